"""Vanishing gradients: a signal that fades on its way to the input, or a gradient that fell with nothing learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text, sites_text
from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import TOTAL, Layout, Mask, Sites
from gradwatch.rules.evidence.attention import makers_of_scores
from gradwatch.rules.evidence.baseline import (
    at_first_text,
    first_and_last,
    first_and_last_loss,
    is_stuck,
    per_full_accumulation,
)
from gradwatch.rules.evidence.depth import (
    FADED,
    LOWEST,
    Profile,
    change_along,
    judged_profile,
    may_differ,
    profile_onset,
    recent_profiles,
)
from gradwatch.rules.evidence.layer_levels import (
    began_at_zero,
    bias_text,
    biases_of,
    factor_remedy,
    gives_its_bias_alone,
    latest,
    median_over_usual,
    median_weight_change,
    normalises_two_numbers,
)
from gradwatch.rules.evidence.paths import NO_LAYER, paths
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import held_layers, held_text, is_alone
from gradwatch.rules.evidence.recurrent_gradients import faded_through_time, fades_are_due
from gradwatch.rules.evidence.samples import forward_order, own_onset
from gradwatch.rules.evidence.weights import grows_from_zero, has_norm_layers, norms_text, sensitivity
from gradwatch.rules.evidence.wording import ratio_text, steps_text
from gradwatch.rules.rule import CheckedRule

SMALL_RATIO = 0.8
"""Norm of the weights of the layers in question, in the median, over the usual one, at which they are not small.
Measured in the zoo: PyTorch's own start has 0.57 and He's 1.4 times; half of He's 0.7."""

SHRUNK_RATIO = 0.9
"""Ratio of the weights of these layers to their first ones, in the median, above which they have not shrunk.
Judgement."""

SMALL_SHARE = 0.5
"""Share of the faint layers over which the start is too small, so that those which start from nearly zero wait for
nothing. Judgement: a block with a scale that starts at 1e-5 has six other layers."""

CLOSING_BIAS = 1.0
"""Root mean square of a layer's biases at which a gate may be closed by them. Judgement: a sigmoid at -1 is 0.27."""

STOPPED = ("the model stopped learning", "nothing is learnt there any more")
"""Of the whole model, and of a part of it that is watched."""

DEEP = 12
"""Layers from the faint to the strongest signal from which residual connections are a remedy. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vanishing(CheckedRule):
    """The layers on the input side get next to nothing of what layers after them get; or no layer gets anything."""

    name: ClassVar[str] = "vanishing"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm", "signal_norm", "time_growth", "weight_norm", "input_rms"})

    signal_dex: float = 3.5
    """Decades by which the signals of a layer and of all before it are below the strongest after it. Prototype."""
    branch_dex: float = 2.0
    """Additional decades if a healthy branch flows into that strongest layer too. Judgement: branches may differ in
    scale."""
    gradient_dex: float = 5.0
    """The same as `signal_dex` for gradient norms, if signals are not known. Judgement: sizes and inputs of layers
    differ."""
    stuck_dex: float = 2.0
    """The same as `signal_dex` if the loss has not moved in 150 steps. Measured: three sigmoids have 2.5, and learn
    nothing."""
    sensitivity_dex: float = 2.0
    """Decades by which |gradient| |weight| must be lower, where a norm makes the scale of the signal arbitrary.
    Judgement."""
    time_dex: float = 6.0
    """Decades by which the first time step of a recurrent layer is below its last, while the loss is stuck.
    Prototype."""
    total_dex: float = 4.0
    """Fall of the total gradient below its first level, in decades, while nothing is learnt. Prototype."""
    stuck_share: float = 0.5
    """Share of its first size below which a loss is at its minimum rather than stuck (a policy gradient's is 0).
    Judgement."""
    records: int = 3
    """Samples in a row. Prototype."""
    zero_records: int = 10
    """The same if the signal is exactly zero, and has not faded to what float32 hardly holds. Measured: with batches of
    one, all units of a layer may be zero."""
    ended_records: int = 20
    """Records in a row with no gradient at all. As in `Dead`."""
    first_records: int = 10
    """Number of first records for the first level of gradient and loss, and of last ones for the present level.
    Judgement."""
    stale_records: int = 2000
    """Records without a signal after which gradients are compared instead: twice the longest interval
    (`schedule.py`)."""

    def suspects(self, rows: RecentRows) -> Mask:
        """The total is that far under the opening, recurrent layers are looked at, or two layers are that far apart."""
        suspected = rows.totals <= 10.0**-self.total_dex * rows.openings[:, 1]
        if rows.history.has("time_growth"):
            suspected |= fades_are_due(rows.lengths, rows.fresh.get("time_growth", rows.nowhere))
        least = min(self.signal_dex, self.stuck_dex)
        apart = may_differ(rows, least, self.gradient_dex, self.stale_records, zeros=True)
        return np.asarray(suspected | apart)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if not len(history):
            return None
        ended = history.total == 0 and is_alone(history)
        died = self._ended(history) if ended else self._died(history)
        if died:
            return [died]
        faded = faded_through_time(history, dex=self.time_dex, records=self.records)
        if faded and history.whole:
            return [faded]
        found = self._fades(history)
        return None if faded and not found else found  # something may have been learnt before the history

    def _ended(self, history: History) -> Finding | None:
        """There was a gradient, and since one step there is none at all, while the loss is neither 0 nor low."""
        norms, losses = history.series("grad_norm"), history.scalar("loss", self.ended_records)
        loss = first_and_last_loss(history, self.first_records)
        if loss is None or not np.nanmax(norms) > 0:
            return None
        # a hinge or a reward of 0 has no slope
        if (norms[-self.ended_records :] != 0).any() or not (np.abs(losses) > 0).all():
            return None
        if not loss[1] > loss[0] - self.stuck_share * abs(loss[0]):
            return None
        onset = own_onset(history, norms == 0)
        for_long = steps_text(history, onset)
        part, sites = history.layout.partial, held_layers(history)
        whose = f"{name_text(sites)}, {held_text(history)}," if part else "every layer"
        message = (
            f"The gradient of {whose} has been exactly 0 for {for_long}, and the loss is {number_text(loss[1], 3)} "
            f"({number_text(loss[0], 3)} {at_first_text(history)}): {STOPPED[part]}. Most often a ReLU or clamp of "
            f"{'what follows' if part else 'its outputs'} gives one number only, or {'its ' * (not part)}units are "
            "saturated or dead, after too large a step."
        )
        headline = f"every {'watched ' * part}gradient has been exactly 0 for {for_long}"
        remedy = "no ReLU or clamp after the last layer; or a smaller lr in configure_optimizers, with warm-up."
        limit = float(self.ended_records)
        layer = sites[0] if sites else TOTAL
        return Finding(self.name, Severity.WARNING, layer, sites, onset, limit, message, remedy, onset, headline)

    def _died(self, history: History) -> Finding | None:
        """The whole gradient fell, and the loss did not."""
        now, under = history.total, 10.0**-self.total_dex
        if not now <= under * history.opening[1]:
            return None
        levels = first_and_last(
            history, per_full_accumulation(history, len(history))[:, 0], self.first_records, self.first_records
        )
        loss = first_and_last_loss(history, self.first_records)
        if levels is None or loss is None or loss[1] < loss[0]:
            return None
        # of several optimizers one starves where its loss rises to 0: that of log(1 - D(G(z))) does
        if abs(loss[1]) < self.stuck_share * abs(loss[0]) and is_alone(history):
            return None
        early = float(np.median(levels[0]))
        if early <= 0 or not (levels[1] <= under * early).all():
            return None
        fall = float(np.log10(early / now)) if now > 0 else -LOWEST
        onset = own_onset(history, history.series("grad_norm") <= early * under)
        sites = held_layers(history)
        fell = f"The gradient of {name_text(sites)}, {held_text(history)}, fell from a norm of"
        levels_text = f"({number_text(loss[0], 3)} {at_first_text(history)}, now {number_text(loss[1], 3)})"
        message = (
            f"{fell if sites else 'The total gradient norm fell from'} {number_text(early)} to {number_text(now)} "
            f"while the loss did not improve {levels_text}: {STOPPED[history.layout.partial]}. Most often "
            f"{'its ' * (not sites)}units are saturated or dead, after too large a step."
        )
        headline = f"the gradient norm fell from {number_text(early)} to {number_text(now)}, the loss did not"
        remedy = "a smaller lr in configure_optimizers, with warm-up."
        layer = sites[0] if sites else TOTAL
        if not is_alone(history):
            message = (
                f"{fell} {number_text(early)} to {number_text(now)} while its loss did not improve {levels_text}: it "
                "learns nothing more. Most often its units are saturated or dead, after too large a step, or its loss "
                "is flat where another model is sure, as log(1 - D(G(z))) is."
            )
            remedy = (
                "a smaller lr for this optimizer; or a loss with a slope there, such as F.softplus(-logits), or fewer "
                "and smaller steps of the others."
            )
        return Finding(
            self.name, Severity.WARNING, layer, sites, fall, self.total_dex, message, remedy, onset, headline
        )

    def _fades(self, history: History) -> Sequence[Finding] | None:
        """What fades from layer to layer: by less counts, where the loss is stuck."""
        judged = judged_profile(history, self.signal_dex, self.gradient_dex, self.stale_records)
        if judged is None:
            return None
        found = self._over_depth(history, *judged)
        if found or history.newest("signal_norm") > 1 or (stuck := is_stuck(history)) is False:
            return found
        found = self._over_depth(history, judged[0], self.stuck_dex)
        return found if stuck or not found else None

    def _over_depth(self, history: History, now: Profile, dex: float) -> Sequence[Finding] | None:
        """The layers whose signal, with that of all before them, is `dex` under the strongest after them."""
        # a cheap first look: what is faint begins at an input
        if now.values[paths(history.layout, now.sites).starts].min() * 10.0**dex > now.values.max():
            return []
        faint = self._faint(history.layout, now, dex)
        if not len(faint):
            return []
        signals = now.values[np.isin(now.sites, faint)]
        fades = ((signals > 0) & (signals < FADED)).any()  # float32 holds no smaller ones
        records = self.records if signals[0] > 0 or fades else self.zero_records
        profiles = recent_profiles(history, now, records)
        if len(profiles) < records:
            return None
        faint = reduce(np.intersect1d, [faint, *(self._faint(history.layout, each, dex) for each in profiles[1:])])
        faint = self._unexcused(history, now, faint) if len(faint) else faint
        if not len(faint):
            return []
        them = set(faint.tolist())
        onset, from_start = profile_onset(
            history, now, lambda each: not them.isdisjoint(self._faint(history.layout, each, dex).tolist())
        )
        return [self._finding(history, now, faint, dex, onset, from_start)]

    def _faint(self, layout: Layout, now: Profile, dex: float) -> Sites:
        """The layers that lie, with all upstream of them, `dex` under the strongest downstream of them."""
        flow, logs = paths(layout, now.sites), now.logs
        upstream = flow.upstream(logs)
        fall = flow.downstream(logs)[0] - upstream
        faint = fall >= dex
        if faint.any():
            # a healthy branch may flow into the strongest, too
            joined = flow.below(flow.starts & ~faint)
            inside = flow.downstream(np.where(joined, NO_LAYER, logs))[0] - upstream
            faint &= (inside >= dex) | (fall >= dex + self.branch_dex)
        # while an attention weighs all places alike, or all values are alike, its scores hardly matter
        if layout.edges is not None and faint.any() and len(scores := makers_of_scores(layout)):
            faint &= ~flow.only_through(np.isin(now.sites, scores))
        return now.sites[faint]

    def _unexcused(self, history: History, now: Profile, faint: Sites) -> Sites:
        """Those of `faint` that wait for no layer behind them which starts from zero; none where a norm absorbs the
        scale.
        """
        order = forward_order(history.layout)
        elsewhere = np.setdiff1d(history.layout.layers, order)  # parameters used by others: who knows where
        if len(elsewhere) and grows_from_zero(history, elsewhere).any():
            return faint[:0]
        whole, zero = paths(history.layout, order), grows_from_zero(history, order)
        if zero.any():
            waiting, small = whole.above(zero), zero[np.isin(order, faint)]
            if small.sum() > SMALL_SHARE * len(small):
                waiting &= ~zero
            faint = np.setdiff1d(faint, order[waiting])
        found = sensitivity(history, now.sites)
        if len(faint) and found is not None:
            inside = np.isin(now.sites, faint)
            behind = paths(history.layout, now.sites).below(inside)
            if found[inside].max() * 10.0**self.sensitivity_dex > found[behind].max():
                return faint[:0]
        return faint

    def _finding(
        self, history: History, now: Profile, faint: Sites, dex: float, onset: int, from_start: bool
    ) -> Finding:
        layout = history.layout
        flow = paths(layout, now.sites)
        behind, peaks = flow.downstream(now.logs)
        inside = np.isin(now.sites, faint)
        inputs = np.flatnonzero(inside & ~flow.below(inside))
        first = int(inputs[np.argmax((behind - now.logs)[inputs])])
        way = flow.way(first, int(peaks[first]), now.logs)
        change, logs = change_along(layout, now, way, stronger_at_input=False), now.logs[way]
        names, layer = change.names, change.named[0]
        peak = len(way) - 1
        fall = float(logs[peak] - logs[0])
        if now.values[first] == 0:
            message = f"No {now.quantity} at all reaches layer {names[0]}, while layer {names[peak]} gets one."
            headline = f"no {now.quantity} reaches layer {names[0]}"
        else:
            message = (
                f"The {now.quantity} of layer {names[0]} is {ratio_text(fall)} times weaker than that of layer "
                f"{names[peak]}, for {self.records} samples; up to {ratio_text(dex)} is normal"
                f"{' where the loss has not moved' if dex == self.stuck_dex else ''}."
            )
            headline = f"{ratio_text(fall)} times weaker than {sites_text([names[peak]])}"
        passing, edge = now.sites[way[1:]], now.sites[way[change.edge + 1]]
        zeros = began_at_zero(history, passing)
        by_zeros = edge in zeros if change.abrupt else 2 * len(zeros) >= len(passing)
        if by_zeros:
            them = name_text(layout.names(zeros))
            cause = f"The weights of {them} began at 0, and pass on little."
            remedy = _init_remedy(layout, zeros)
        elif change.abrupt:
            ends = now.values[way[change.edge]] == 0
            cause, remedy = _why_abrupt(history, *change.named, ends=ends, from_start=from_start)
        else:
            seen = int((now.values[way] > 0).argmax())  # before it float32 holds nothing
            rate = float(logs[peak] - logs[seen]) / (peak - seen)
            cause, remedy = _why_gradual(history, now.sites, faint, rate, onset, from_start)
            if peak >= DEEP and "residual" not in remedy:
                remedy = f"{remedy.removesuffix('.')}; or residual connections around the layers: x + layer(x)."
        sites, text = layout.names(np.sort(faint)), f"{message} {cause}"
        return Finding(self.name, Severity.WARNING, layer, sites, fall, dex, text, remedy, onset, headline)


def _why_abrupt(history: History, layer: str, after: str, *, ends: bool, from_start: bool) -> tuple[str, str]:
    """The likely cause of a signal that fades, or `ends`, between two layers, and what to change."""
    if normalises_two_numbers(history.layout, after):
        cause = f"Layer {after} normalises two numbers: it makes 1 and -1 of them, whatever they are."
        return cause, f"a norm over more features in place of layer {after}, or none."
    if gives_its_bias_alone(history, after):
        cause = (
            f"Layer {after} gives little but its bias: it normalises one number at a time, or numbers that hardly "
            "differ."
        )
        return cause, f"a norm over several features in place of layer {after}, or none."
    if ends:
        cause = f"It ends between layers {after} and {layer}: dead or saturated units, or a factor of 0."
        return (
            cause,
            f"a smaller lr in configure_optimizers, or nn.LeakyReLU after layer {layer} if its units are dead.",
        )
    factor = factor_remedy(history, layer, after)
    what = "a factor makes what passes small" if factor else "saturation, a factor or a bottleneck"
    cause = f"Most is lost between layers {after} and {layer}: {what}."
    if factor:
        return cause, factor
    smaller = "" if from_start else "a smaller lr in configure_optimizers; or "
    if "Norm" in history.layout.sites[history.layout.index[after]].module:
        return cause, f"{smaller}no constant factor and no saturated activation between {layer} and {after}."
    return cause, f"{smaller}a normalisation layer between {layer} and {after}, and no constant factor there."


def _init_remedy(layout: Layout, layers: Sites) -> str:
    """What gives `layers` weights other than 0. `kaiming_normal_` refuses those of one dimension, as a norm has."""
    flat = np.array([all(len(layout.sites[own].shape) < 2 for own in layout.parameters_of(site)) for site in layers])
    fills = (("ones_", layers[flat]), ("kaiming_normal_", layers[~flat]))
    texts = [f"nn.init.{fill} for the weights of {name_text(layout.names(own))}" for fill, own in fills if len(own)]
    return f"{'; '.join(texts)}."


def _why_gradual(
    history: History, layers: Sites, faint: Sites, dex_per_layer: float, onset: int, from_start: bool
) -> tuple[str, str]:
    """The likely cause of a signal that fades along `layers`, to those that are `faint`, and what to change."""
    layout, fades = history.layout, f"It fades gradually, by {ratio_text(dex_per_layer)} times a layer"
    squashing = next((name for name in ("Sigmoid", "Tanh", "Softmax") if name in layout.modules), None)
    if squashing == "Sigmoid" and (from_start or not has_norm_layers(layout)):
        cause = f"{fades}: nn.Sigmoid passes on a quarter of a signal at most."
        return cause, "nn.ReLU instead of nn.Sigmoid, with nn.init.kaiming_normal_ weights."
    if has_norm_layers(layout):
        skips = (
            "residual connections around the layers: x + layer(x); where there are some, with the norm inside: "
            "x + layer(norm(x))."
        )
        return f"{fades}, {norms_text(layout)}.", skips if from_start else f"a smaller lr, or {skips}"
    over_usual = median_over_usual(history, faint)
    small = not over_usual > SMALL_RATIO  # also where it is not known
    if squashing == "Tanh":
        size = "too small or too large" if np.isnan(over_usual) else "too small" if small else "too large"
        cause = f"{fades}: nn.Tanh with weights {size}, and no norm."
        return cause, "nn.init.xavier_normal_(weight, gain=5 / 3) for the weights before each nn.Tanh."
    closed = [site for site in layers if latest(biases_of(history, int(site))) >= CLOSING_BIAS]
    biased = [name for site in closed if bias_text(history, int(site)) for name in layout.names([site])]
    if biased:
        cause = (
            f"{fades}. The biases of {name_text(biased)} make most of their outputs: a gate that they close, or hold "
            "where it is flat, passes next to nothing."
        )
        which = f"layer{'s' * (len(biased) > 1)} {', '.join(biased)}"
        return cause, f"nn.init.ones_ for the bias{'es' * (len(biased) > 1)} of {which}: a gate starts open then."
    if squashing == "Softmax":
        cause = f"{fades}: nn.Softmax divides what it passes on among its outputs."
        return cause, "nn.ReLU instead of nn.Softmax between layers, with nn.init.kaiming_normal_ weights."
    if not small:
        cause = f"{fades}, though the weights are not small, and there is no norm."
        return cause, "residual connections around the layers: x + layer(x)."
    often = "most often " * bool(np.isnan(over_usual))
    change = median_weight_change(history, faint, onset)
    if not from_start and not change > SHRUNK_RATIO:  # also where it is not known
        return f"{fades}: {often}the weights have become too small.", "a smaller lr, or less weight decay or clamping."
    which = "initial weights" if from_start else "weights"
    cause = f"{fades}: {often}the {which} are too small, and there is no norm."
    return cause, "nn.init.kaiming_normal_ for the weights."
