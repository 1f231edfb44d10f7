"""Gradients through time: recurrent layers whose first time step gets far more, or far less, than their last."""

from __future__ import annotations

from math import hypot

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.record import Floats, Layout, Mask
from gradwatch.rules.evidence.baseline import first_and_last
from gradwatch.rules.evidence.depth import ABRUPT_SHARE, STREAK_SAMPLES
from gradwatch.rules.evidence.samples import RECENT_RECORDS, records_with
from gradwatch.rules.evidence.wording import ratio_text

STUCK_RECORDS = 100
"""Records after which a loss that has not improved is stuck. Judgement: a plateau at the start passes."""

FALLEN_SHARE = 0.05
"""Share of its first size by which a loss that is not stuck has fallen. Judgement: that of classifiers that learn
nothing falls by 0.01 to 0.02, as they learn the frequencies of the classes (measured)."""

FALL_STANDARD_ERRORS = 3.0
"""Standard errors by which the loss of the last third of a run is lower than that of its first third where it still
improves. Judgement. A loss in which so many are more than `FALLEN_SHARE` is too noisy to judge."""

LOSS_CHECK_INTERVAL = 10
"""Records between two checks of the loss where no sample is due. Judgement."""

GATED = ("LSTM", "LSTMCell", "GRU", "GRUCell")


def grown_through_time(history: History, *, dex: float, records: int) -> Finding | None:
    """A layer's first time step gets `dex` more than its last, gained step by step: in `records` samples in a row, or
    in all there are: such a run may not live to see more.
    """
    if history.age("time_growth") or not len(places := _samples(history, records)):
        return None
    layout, growth, jump = history.layout, _window(history, "time_growth"), _window(history, "time_jump")
    there = (growth[places] >= dex) & (jump[places] < ABRUPT_SHARE * growth[places])
    sites = _throughout(layout, there)
    if not len(sites):
        return None
    worst = int(sites[growth[-1, sites].argmax()])
    value, steps = float(growth[-1, worst]), int(_window(history, "time_steps")[-1, worst])
    what = f"of {steps} time steps of layer {layout.sites[worst].name}"
    if _both_ways(layout, worst):
        message = (
            f"The gradient that reaches the ends {what} has grown {ratio_text(value)} times on its way through them"
        )
    else:
        message = (
            f"The gradient that reaches the first {what} is {ratio_text(value)} times stronger than that of the last"
        )
    message += (
        f"; up to {ratio_text(dex)} is normal. It grows by "
        f"{10 ** (value / (steps - 1)):.2g} times a step: the recurrent weights amplify."
    )
    remedy = f"nn.init.orthogonal_({_recurrent_weight(layout, worst)}), and gradient clipping."
    names, layer = layout.names(sites), layout.sites[worst].name
    samples = _samples(history, STREAK_SAMPLES)
    steep = (growth[samples] >= dex) & (jump[samples] < ABRUPT_SHARE * growth[samples])
    back = _begun(np.asarray(steep[:, sites].any(axis=1)), samples, len(growth))
    headline = f"the gradient grows {ratio_text(value)} times over {steps} time steps"
    return Finding("exploding", Severity.WARNING, layer, names, value, dex, message, remedy, back, headline)


def fades_are_due(records: NDArray[np.intp], sampled: Mask) -> Mask:
    """Whether `faded_through_time` looks: at samples, and every few records, as the loss may have got stuck. Of any
    shape: the number of records, and whether the latest of them is a sample.
    """
    return np.asarray((records >= STUCK_RECORDS) & (sampled | (records % LOSS_CHECK_INTERVAL == 0)))


def faded_through_time(history: History, *, dex: float, records: int) -> Finding | None:
    """A layer's first time step gets `dex` less than its last in `records` samples in a row, and the loss is stuck."""
    if not fades_are_due(np.array(len(history)), np.array(history.age("time_growth") == 0)):
        return None
    places = _samples(history, records)
    if len(places) < records:
        return None
    layout, growth = history.layout, _window(history, "time_growth")
    sites = _throughout(layout, growth[places] <= -dex)
    if not len(sites) or (loss := _stuck(history)) is None:
        return None
    latest = growth[places[-1]]
    worst = int(sites[latest[sites].argmin()])
    value, steps = -float(latest[worst]), int(_window(history, "time_steps")[places[-1], worst])
    what = f"of {steps} time steps of layer {layout.sites[worst].name}"
    weak, strong, lost = ("weakest", "end", "far from it") if _both_ways(layout, worst) else ("first", "last", "early")
    message = (
        f"The gradient that reaches the {weak} {what} is {ratio_text(value)} times weaker than that of the {strong}, "
        f"for {records} samples; up to {ratio_text(dex)} is normal. The loss has not improved since the start "
        f"({loss[0]:.3g}, now {loss[1]:.3g}): what came {lost} in a sequence cannot be learnt."
    )
    cause, remedy = _forgetting(layout, worst, steps)
    names, layer = layout.names(sites), layout.sites[worst].name
    text, samples = f"{message} {cause}", _samples(history, STREAK_SAMPLES)
    back = _begun(np.asarray((growth[samples] <= -dex)[:, sites].any(axis=1)), samples, len(growth))
    headline = f"the gradient fades {ratio_text(value)} times over {steps} time steps"
    return Finding("vanishing", Severity.WARNING, layer, names, value, dex, text, remedy, back, headline)


def _begun(shown: Mask, places: NDArray[np.intp], records: int) -> int:
    """The position, from the end of the `records`, of the first sample of those in a row, up to the latest, at which it
    is `shown`: shape [samples], of `places`.
    """
    before = np.flatnonzero(~shown)
    return records - int(places[int(before[-1]) + 1 if len(before) else 0])


def _samples(history: History, records: int) -> NDArray[np.intp]:
    """Which of the last `RECENT_RECORDS` are the newest samples of the latest's optimizer, `records` at most."""
    rows, age = history.window("time_growth", RECENT_RECORDS), history.age("time_growth")
    if rows is None or age >= len(rows):
        return np.empty(0, dtype=np.intp)
    known = np.flatnonzero(~np.isnan(rows[len(rows) - 1 - age]))
    places = records_with(history, "time_growth", RECENT_RECORDS, among=known[:1])
    optimizers = history.optimizers(RECENT_RECORDS)
    own: NDArray[np.intp] = places[optimizers[places] == optimizers[-1]]
    return own[-records:]


def _throughout(layout: Layout, there: NDArray[np.bool_]) -> NDArray[np.intp]:
    """The layers that are `there` [samples, sites] in all samples."""
    always = np.flatnonzero(there[:, layout.layers].all(axis=0))
    return layout.layers[always]


def _window(history: History, statistic: str) -> Floats:
    rows = history.window(statistic, RECENT_RECORDS)
    assert rows is not None, "the three come together"
    return rows


def _stuck(history: History) -> tuple[float, float] | None:
    """The loss at the start and now, where it has not improved in between; None where it has, or is not known."""
    levels = first_and_last(history, "loss", STUCK_RECORDS // 5, STUCK_RECORDS // 5)
    if levels is None:
        return None
    first, now = float(np.median(levels[0])), float(np.median(levels[1]))
    optimizers, series = history.optimizers(len(history)), history.scalar("loss", len(history))
    if series is None or not now > first - FALLEN_SHARE * abs(first):
        return None
    own = series[(optimizers == optimizers[-1]) & np.isfinite(series)]
    third = len(own) // 3
    if third < STUCK_RECORDS // 4:
        return None
    (early, spread), (late, spread_late) = _level(own[:third]), _level(own[-third:])
    margin = FALL_STANDARD_ERRORS * hypot(spread, spread_late) / third**0.5
    noticed = margin <= FALLEN_SHARE * abs(first) and late > first - FALLEN_SHARE * abs(first)
    return (first, now) if noticed and early - late <= margin else None


def _level(numbers: Floats) -> tuple[float, float]:
    """The median, and its standard error for one number: 1.2533 times that of a mean, of which 1.4826 MAD is one."""
    median = float(np.median(numbers))
    return median, 1.2533 * 1.4826 * float(np.median(np.abs(numbers - median)))


def _both_ways(layout: Layout, site: int) -> bool:
    return any("_reverse" in layout.sites[i].name for i in layout.parameters[layout.owners == site])


def _recurrent_weight(layout: Layout, site: int) -> str:
    """The name of the weights that the state is multiplied by at every step; the first layer's, forward."""
    own = [layout.sites[i].name for i, owner in zip(layout.parameters, layout.owners, strict=True) if owner == site]
    names = [name for name in own if "weight_hh" in name] or [name for name in own if name.endswith("weight")] or own
    return names[0] if names else f"{layout.sites[site].name}.weight"


def _forgetting(layout: Layout, site: int, steps: int) -> tuple[str, str]:
    """Why a layer forgets over `steps` time steps, and what to change."""
    kind, weight = layout.sites[site].module, _recurrent_weight(layout, site)
    bias = weight.replace("weight_hh", "bias_hh")
    if kind in GATED and bias in layout.index:
        gate = "forget" if kind.startswith("LSTM") else "update"
        cause = f"At every step its {gate} gates, half shut as they start, take a part of the state away."
        remedy = (
            f"{gate} gates that start open, nn.init.ones_({bias}[hidden_size : 2 * hidden_size]), or shorter sequences "
            "(truncated backpropagation)."
        )
        return cause, remedy
    cause = "At every step its recurrent weights and the slope of its activation shrink it."
    lstm = "nn.LSTMCell" if kind != "RNN" else "nn.LSTM"
    return cause, f"nn.init.orthogonal_({weight}), or {lstm} in its place."
