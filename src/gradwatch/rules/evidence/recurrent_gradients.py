"""Gradients through time: recurrent layers whose first time step gets far more, or far less, than their last."""

from __future__ import annotations

from math import hypot

import numpy as np

from gradwatch.core.alert import Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.median import MEDIAN_ERROR
from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Layout, Mask, Sites
from gradwatch.rules.evidence.baseline import first_and_last_loss, median_and_spread
from gradwatch.rules.evidence.depth import ABRUPT_SHARE, ONSET_SAMPLES
from gradwatch.rules.evidence.layer_levels import UNSCALED_INPUT_RMS, latest, series_of
from gradwatch.rules.evidence.records import own_losses
from gradwatch.rules.evidence.samples import RECENT_RECORDS, onset_of, own_sample_backs
from gradwatch.rules.evidence.wording import ratio_text

UNIMPROVED_RECORDS = 100
"""Records after which a loss that has not improved is stuck. Judgement: a plateau at the start passes."""

FALLEN_SHARE = 0.05
"""Share of its first size by which a loss that is not stuck has fallen. Judgement: that of classifiers that learn
nothing falls by 0.01 to 0.02, as they learn the frequencies of the classes (measured)."""

FALL_STANDARD_ERRORS = 3.0
"""Standard errors by which the loss of the last third of a run is lower than that of its first third where it still
improves. Judgement. A loss in which so many are more than `FALLEN_SHARE` is too noisy to judge."""

LOSS_CHECK_INTERVAL = 10
"""Records between two checks of the loss where no sample is due. Judgement."""

AMPLIFYING_GAIN = 2.0
"""dex by which the gradient of a time step exceeds that of all outputs of a layer that amplifies: one pass through its
input weights adds one at most. Where it does not, the loss uses the first outputs more than the last. Judgement."""

GATED = ("LSTM", "LSTMCell", "GRU", "GRUCell")


def grown_through_time(history: History, *, dex: float, records: int) -> Finding | None:
    """A layer's first time step gets `dex` more than its last, gained step by step: in `records` samples in a row, or
    in all there are: such a run may not live to see more.
    """
    if history.newest("time_growth") > 1 or not len(backs := _samples(history, records)):
        return None
    layout, growth, steep = history.layout, history.at("time_growth", backs), _is_steep(history, backs, dex)
    sites = layout.layers[steep[:, layout.layers].all(axis=0)]
    if not len(sites):
        return None
    worst = int(sites[growth[-1, sites].argmax()])
    value, steps = float(growth[-1, worst]), int(history.at("time_steps", backs)[-1, worst])
    what = f"of {steps} time steps of layer {layout.sites[worst].name}"
    grown = f"first {what} is {ratio_text(value)} times stronger than that of the last"
    if _both_ways(layout, worst):
        grown = f"ends {what} has grown {ratio_text(value)} times on its way through them"
    message = (
        f"The gradient that reaches the {grown}; up to {ratio_text(dex)} is normal. It grows by "
        f"{number_text(10 ** (value / (steps - 1)))} times a step: the recurrent weights amplify."
    )
    remedy = f"nn.init.orthogonal_({_recurrent_weight(layout, worst)}), and gradient clipping."
    names, layer = layout.names(sites), layout.sites[worst].name
    backs = _samples(history, ONSET_SAMPLES)
    onset = int(onset_of(np.asarray(_is_steep(history, backs, dex)[:, sites].any(axis=1)), backs))
    headline = f"the gradient grows {ratio_text(value)} times over {steps} time steps"
    return Finding("exploding", Severity.WARNING, layer, names, value, dex, message, remedy, onset, headline)


def fades_are_due(records: Sites, sampled: Mask) -> Mask:
    """Whether `faded_through_time` looks: at samples, and every few records, as the loss may have got stuck. Of any
    shape: the number of records, and whether the latest of them is a sample.
    """
    return np.asarray((records >= UNIMPROVED_RECORDS) & (sampled | (records % LOSS_CHECK_INTERVAL == 0)))


def faded_through_time(history: History, *, dex: float, records: int) -> Finding | None:
    """A layer's first time step gets `dex` less than its last in `records` samples in a row, and the loss is stuck:
    since the start of the run, if the history is whole.
    """
    if history.whole and not fades_are_due(np.array(len(history)), np.array(history.newest("time_growth") == 1)):
        return None
    backs = _samples(history, records)
    if len(backs) < records:
        return None
    layout, growth = history.layout, history.at("time_growth", backs)
    sites = layout.layers[(growth[:, layout.layers] <= -dex).all(axis=0)]
    if not len(sites) or (loss := _unimproved_loss(history)) is None:
        return None
    worst = int(sites[growth[-1, sites].argmin()])
    value, steps = -float(growth[-1, worst]), int(history.at("time_steps", backs)[-1, worst])
    what = f"of {steps} time steps of layer {layout.sites[worst].name}"
    weak, strong, lost = ("weakest", "end", "far from it") if _both_ways(layout, worst) else ("first", "last", "early")
    message = (
        f"The gradient that reaches the {weak} {what} is {ratio_text(value)} times weaker than that of the {strong}, "
        f"for {records} samples; up to {ratio_text(dex)} is normal. The loss has not improved since the start "
        f"({number_text(loss[0], 3)}, now {number_text(loss[1], 3)}): what came {lost} in a sequence cannot be learnt."
    )
    cause, remedy = _why_forgotten(history, worst)
    names, layer = layout.names(sites), layout.sites[worst].name
    text, backs = f"{message} {cause}", _samples(history, ONSET_SAMPLES)
    onset = int(onset_of(np.asarray((history.at("time_growth", backs)[:, sites] <= -dex).any(axis=1)), backs))
    headline = f"the gradient fades {ratio_text(value)} times over {steps} time steps"
    return Finding("vanishing", Severity.WARNING, layer, names, value, dex, text, remedy, onset, headline)


def _samples(history: History, count: int) -> Sites:
    """The positions, from the end, of this optimizer's newest samples, `count` at most, oldest first."""
    rows, _ = history.samples("time_growth", RECENT_RECORDS)
    known = np.flatnonzero(~np.isnan(rows[-1:]).all(axis=0))
    return own_sample_backs(history, "time_growth", sites=known[:1])[-count:]


def _is_steep(history: History, backs: Sites, dex: float) -> Mask:
    """Where the gradient grew by `dex`, step by step, at the records `backs`: shape [records, sites]."""
    growth, jump, gain = (history.at(name, backs) for name in ("time_growth", "time_jump", "time_gain"))
    return np.asarray((growth >= dex) & (jump < ABRUPT_SHARE * growth) & ~(gain < AMPLIFYING_GAIN))


def _unimproved_loss(history: History) -> tuple[float, float] | None:
    """The loss at the start and now, where it has not improved in between; None where it has, or is not known."""
    levels = first_and_last_loss(history, UNIMPROVED_RECORDS // 5)
    if levels is None:
        return None
    first, now = levels
    own = own_losses(history, len(history))
    third = len(own) // 3
    if third < UNIMPROVED_RECORDS // 4 or not now > first - FALLEN_SHARE * abs(first):
        return None
    (early, spread), (late, spread_late) = _level(own[:third]), _level(own[-third:])
    margin = FALL_STANDARD_ERRORS * hypot(spread, spread_late) / third**0.5
    noticed = margin <= FALLEN_SHARE * abs(first) and late > first - FALLEN_SHARE * abs(first)
    return (first, now) if noticed and early - late <= margin else None


def _level(numbers: Floats) -> tuple[float, float]:
    """The median, and its standard error for one number."""
    level, spread = median_and_spread(numbers)
    return float(level), MEDIAN_ERROR * float(spread)


def _both_ways(layout: Layout, site: int) -> bool:
    return any("_reverse" in name for name in layout.names(layout.parameters_of(site)))


def _recurrent_weight(layout: Layout, site: int) -> str:
    """The name of the weights that the state is multiplied by at every step; the first layer's, forward."""
    own = layout.names(layout.parameters_of(site))
    names = [name for name in own if "weight_hh" in name] or [name for name in own if name.endswith("weight")] or own
    return names[0]


def _why_forgotten(history: History, site: int) -> tuple[str, str]:
    """Why a layer forgets over its time steps, and what to change."""
    layout = history.layout
    layer, kind = layout.sites[site].name, layout.sites[site].module
    rms = latest(series_of(history, "input_rms", site))
    if rms > UNSCALED_INPUT_RMS:
        cause = f"Its inputs have a root mean square of {number_text(rms, 3)}, where sigmoids and tanh are flat."
        return cause, f"(x - mean) / std of the training data before layer {layer}."
    weight = _recurrent_weight(layout, site)
    bias = weight.replace("weight_hh", "bias_hh")
    if kind in GATED and bias in layout.index:
        gate = "forget" if kind.startswith("LSTM") else "update"
        cause = f"At every step its {gate} gates take a part of the state away."
        remedy = (
            f"{gate} gates that start open, nn.init.ones_({bias}[hidden_size : 2 * hidden_size]), or shorter sequences "
            "(truncated backpropagation)."
        )
        return cause, remedy
    cause = "At every step its recurrent weights and the slope of its activation shrink it."
    lstm = "nn.LSTMCell" if kind != "RNN" else "nn.LSTM"
    return cause, f"nn.init.orthogonal_({weight}), or {lstm} in its place."
