"""Exploding gradients: a signal that grows on its way to the input, or a gradient that grew while the loss rose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Finding, Severity, name_text, sites_text
from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import TOTAL, Floats, Layout, Mask, Sites
from gradwatch.rules.evidence.attention import makers_of_scores
from gradwatch.rules.evidence.baseline import first_and_last, first_and_last_loss, per_full_accumulation
from gradwatch.rules.evidence.depth import (
    Profile,
    change_along,
    judged_profile,
    may_differ,
    profile_onset,
    recent_profiles,
)
from gradwatch.rules.evidence.layer_levels import (
    LARGE_RATIO,
    bias_text,
    factor_remedy,
    median_over_usual,
    median_weight_change,
    weights_over_usual,
)
from gradwatch.rules.evidence.learning_rates import (
    MAXIMIZES,
    MAXIMIZES_REMEDY,
    maximizes,
    may_be_large,
    rate_remedy,
)
from gradwatch.rules.evidence.paths import NO_LAYER, Paths, paths
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import held_layers, held_text, is_alone, is_first_record
from gradwatch.rules.evidence.recurrent_gradients import grown_through_time
from gradwatch.rules.evidence.samples import in_run_order, own_onset, own_samples
from gradwatch.rules.evidence.weights import has_norm_layers, norms_text, sensitivity
from gradwatch.rules.evidence.wording import ratio_text
from gradwatch.rules.rule import CheckedRule

OVERFLOWING_NORM = 1e30
"""Norm from which the run is lost: its square is far beyond float32, and so is one more such growth."""

PRESERVING_RATIO = 1.1
"""Norm of the weights of the layers in question, in the median, over the usual one, up to which they do not amplify:
with 1 a signal keeps its size through linear layers (Glorot and Bengio 2010), with 1.4 through ReLUs (He et al. 2015).
"""

UNGROWN_WEIGHTS_RATIO = 1.1
"""Ratio of the weights of these layers to their first ones, in the median, under which they have not grown.
Judgement."""

LOSS_SHARE = 0.01
"""The loss over the root mean square of the last outputs from which it grows with them. Measured: a cross-entropy of
outputs that are far too large is 0.01 to 0.24 of them where all weights are positive, and more of other signs; behind a
norm it is about 1, and squares are far larger."""

MULTIPLIED_RATIO = 10.0
"""Ratio of the outputs of a layer to those of the layer before from which something multiplies between them. Judgement:
usual weights make 1.4 of it at most (He et al. 2015)."""

RECURRENT_MODULES = frozenset({"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"})


@dataclass(frozen=True, slots=True, eq=False)
class _Growth:
    """A signal that grows on its way from the loss to an input."""

    now: Profile
    flow: Paths
    first: int
    """The layer at the input."""
    goal: int
    """The strongest near the loss of those behind it."""
    ends: int
    """Layers that had to agree at each end."""
    dex: float
    strong: NDArray[np.intp]
    """Site indices of the layers whose signal is that far over those near the loss."""

    @property
    def way(self) -> list[int]:
        """The layers from `first` to the loss, past `goal`, where the signal is strongest."""
        path = self.flow.way(self.first, self.goal, self.now.values)
        while not self.flow.ends[path[-1]]:
            path.append(max(self.flow.after[path[-1]], key=lambda j: float(self.now.values[j])))
        return path

    @property
    def last_layers(self) -> NDArray[np.bool_]:
        """Which layers behind `first` are near the loss."""
        start = np.zeros(len(self.flow), dtype=bool)
        start[self.first] = True
        return self.flow.near_loss(self.ends) & self.flow.below(start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploding(CheckedRule):
    """The first layers get far more than the last; or weights that start too large, or what multiplies between layers,
    make outputs and loss huge; or the whole gradient grew with the loss.
    """

    name: ClassVar[str] = "exploding"
    needs: ClassVar[frozenset[str]] = frozenset(
        {
            "grad_norm",
            "signal_norm",
            "weight_norm",
            "update_ratio",
            "input_rms",
            "output_rms",
            "run_order",
            "time_growth",
        }
    )

    signal_dex: float = 3.0
    """Decades by which the signal of the first layers is above that of the last. Prototype."""
    branch_dex: float = 2.0
    """Additional decades if a healthy branch flows into the same layers. Judgement: branches may differ in scale."""
    gradient_dex: float = 5.0
    """The same as `signal_dex` for gradient norms, if signals are not known. Judgement: sizes and inputs of layers
    differ."""
    sensitivity_dex: float = 1.5
    """Decades by which |gradient| |weight| must be higher, where a norm makes the scale of the signal arbitrary.
    Judgement."""
    gradient_share: float = 0.5
    """Share of the decades by which the signal grows, by which gradients must grow, too, in models with norms.
    Judgement: gradients grow as signals do where inputs are of one size, as norms make them."""
    activation_dex: float = 3.0
    """Decades by which outputs near the loss are above all before them, if no norm absorbs the growth; and the last
    ones above the inputs, if the weights start too large. Prototype."""
    total_dex: float = 3.0
    """Growth of the total gradient over its first level, in decades, while the loss has risen. Judgement."""
    time_dex: float = 4.0
    """Decades by which the first time step of a recurrent layer is above its last. Prototype."""
    ends: int = 2
    """Layers at each end that must agree, at most half of all. Judgement: a norm may rescale a single one."""
    records: int = 3
    """Samples in a row. Prototype."""
    at_once: float = 1.5
    """Ratio to the limit, in decades, from which one sample is enough. Judgement: such a run may not last for three."""
    first_records: int = 10
    """Number of first records for the first level of gradient and loss, and of last ones for the present loss.
    Judgement."""
    stale_records: int = 2000
    """Records without a signal after which gradients are compared instead. As in `Vanishing`."""

    def suspects(self, rows: RecentRows) -> Mask:
        """The total is that far over the opening, a sample of recurrent layers, or two layers that far apart."""
        suspected = rows.totals >= 10.0**self.total_dex * rows.openings[:, 0]
        if "time_growth" in rows.fresh:
            suspected |= rows.fresh["time_growth"]
        apart = may_differ(rows, self.signal_dex, self.gradient_dex, self.stale_records, zeros=False)
        if "output_rms" in rows.fresh:
            suspected = suspected | (rows.range_over_layers("output_rms")[1] >= 10.0**self.activation_dex)
        return np.asarray(suspected | apart)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if not len(history):
            return None
        if grew := self._grew(history):
            return [grew]
        if grew := grown_through_time(history, dex=self.time_dex, records=self.records):
            return [grew]
        found = judged_profile(history, self.signal_dex, self.gradient_dex, self.stale_records)
        over_depth = None if found is None else self._over_depth(history, *found)
        if not over_depth and (large := self._starts_large(history)):
            return [large]
        return over_depth

    def _grew(self, history: History) -> Finding | None:
        """The whole gradient grew, and the loss with it."""
        now, over = history.total, 10.0**self.total_dex
        if not now >= over * history.opening[0]:
            return None
        levels = first_and_last(
            history, per_full_accumulation(history, len(history))[:, 0], self.first_records, self.records
        )
        loss = first_and_last_loss(history, self.first_records)
        if levels is None or loss is None or loss[1] <= loss[0]:
            return None
        early = float(np.median(levels[0]))
        if not 0 < early * over <= levels[1].min() or not (maximizes(history) or may_be_large(history)):
            return None
        growth = float(np.log10(min(now, 1e39) / early))
        severity = Severity.ERROR if now > OVERFLOWING_NORM or not np.isfinite(loss[1]) else Severity.WARNING
        onset = own_onset(history, history.series("grad_norm") >= early * over)
        layer, sites, grew, whose = TOTAL, held_layers(history), "The total gradient norm grew from", "the"
        if sites:
            layer, whose = sites[0], "the" if is_alone(history) else "its"
            grew = f"The gradient of {name_text(sites)}, {held_text(history)}, grew from a norm of"
        message = (
            f"{grew} {number_text(early)} to {number_text(now)} and {whose} loss rose with it, "
            f"from {number_text(loss[0], 3)} to {number_text(loss[1], 3)}: "
            f"{MAXIMIZES if maximizes(history) else 'the steps are too large for this loss.'}"
        )
        headline = f"the gradient norm grew from {number_text(early)} to {number_text(now)}"
        remedy = MAXIMIZES_REMEDY if maximizes(history) else rate_remedy(history, back=onset)
        return Finding(self.name, severity, layer, sites, growth, self.total_dex, message, remedy, onset, headline)

    def _over_depth(self, history: History, now: Profile, dex: float) -> Sequence[Finding] | None:
        """The growth of `dex` or more from the loss to an input."""
        found = self._growth(history.layout, now, dex)
        if found is None:
            return []
        around_norms = self._only_rescaled(history, found)
        if around_norms and not self._activations_grow(history, found):
            return []
        if found.dex < self.at_once * dex:
            profiles = recent_profiles(history, now, self.records)
            if len(profiles) < self.records:
                return None
            if any(self._growth(history.layout, each, dex) is None for each in profiles):
                return []
        onset, from_start = profile_onset(
            history, now, lambda profile: self._growth(history.layout, profile, dex) is not None
        )
        return [self._finding(history, found, dex, onset, from_start, around_norms=around_norms)]

    def _growth(self, layout: Layout, now: Profile, dex: float) -> _Growth | None:
        """As `_growth_along`, or else the worst growth within a branch; zeros are left aside."""
        now = now.positive
        found = self._growth_along(layout, now, dex)
        if found is None:
            # while an attention weighs all places alike, or all values are alike, its scores hardly matter
            now = now.of(np.flatnonzero(~np.isin(now.sites, makers_of_scores(layout))))
            parts = [now.of(layers) for layers in paths(layout, now.sites).branches(2 * self.ends)]
            inside = (self._growth_along(layout, part, dex) for part in parts)
            found = max((growth for growth in inside if growth), key=lambda growth: growth.dex, default=None)
        return found

    def _growth_along(self, layout: Layout, now: Profile, dex: float) -> _Growth | None:
        """The worst growth of `dex` or more from the loss to an input: the first layers agree on it, and so do the last
        ones that lie behind them.
        """
        flow = paths(layout, now.sites)
        ends = min(self.ends, flow.depth // 2)
        # a cheap first look: the last layers are near the loss, and what explodes does so at an input
        if not ends or now.values[flow.starts].max() < now.values[flow.ends].min() * 10.0**dex:
            return None
        logs = now.logs
        last = flow.near_loss(ends)
        behind, places = flow.downstream(np.where(last, logs, NO_LAYER))
        agreed = flow.agreed(logs, ends)
        rises = np.where(flow.starts & ~last, agreed - behind, NO_LAYER)
        calm = flow.starts & (rises < dex)
        calm |= flow.below(calm)
        rises[rises < dex + self.branch_dex * calm[places]] = NO_LAYER
        first = int(rises.argmax())
        if rises[first] == NO_LAYER:
            return None
        strong = ~last & (logs - behind >= dex)
        return _Growth(now, flow, first, int(places[first]), ends, float(rises[first]), now.sites[strong])

    def _only_rescaled(self, history: History, found: _Growth) -> bool:
        """Whether a norm absorbs the growth: the first layers matter to the loss as much as the last, or hardly any of
        it comes to gradients, as where only inputs of 0 are multiplied, of which a norm makes nothing larger.
        """
        weights, gradients = sensitivity(history, found.now.sites), history.row("grad_norm")[found.now.sites]
        if weights is None:
            return False
        first, last = found.way[: found.ends], found.last_layers
        return bool(
            weights[first].max() < weights[last].max() * 10.0**self.sensitivity_dex
            or gradients[first].max() < gradients[last].max() * 10.0 ** (self.gradient_share * found.dex)
        )

    def _activations_grow(self, history: History, found: _Growth) -> bool:
        """Whether what the layers near the loss give out is far over all before: then the growth is no matter of scale,
        as on a way around the norms that multiplies.
        """
        outputs, last = history.row("output_rms")[found.now.sites], found.last_layers
        before = found.flow.above(last) & ~last
        return bool(np.fmax.reduce(outputs[last]) >= 10.0**self.activation_dex * outputs[before].max())

    def _finding(
        self, history: History, found: _Growth, dex: float, onset: int, from_start: bool, *, around_norms: bool
    ) -> Finding:
        """`around_norms`: whether the growth is on a way around the norms, which absorb it elsewhere."""
        layout, now, way = history.layout, found.now, found.way
        change = change_along(layout, now, way, stronger_at_input=True)
        names, (layer, after) = change.names, change.named
        severity = Severity.ERROR if now.values.max() > OVERFLOWING_NORM else Severity.WARNING
        message = (
            f"The {now.quantity} of layer {names[0]} is {ratio_text(found.dex)} times stronger than that of layer "
            f"{names[-1]}; up to {ratio_text(dex)} is normal."
        )
        if around_norms:
            cause = f"The outputs grow as much up to layer {names[-1]}: skip connections multiply, around the norms."
            remedy = "x + layer(x) with a factor of 1 for x, and a norm before the last layer."
        elif change.abrupt and layout.sites[now.sites[way[change.edge + 1]]].module in RECURRENT_MODULES:
            cause = f"Most is gained inside layer {after}, step by step through time: its recurrent weights amplify."
            remedy = f"nn.init.orthogonal_ for the weight_hh of layer {after}, and gradient clipping."
        elif change.abrupt:
            large = weights_over_usual(history, layout.index[after]) >= LARGE_RATIO
            factor = factor_remedy(history, layer, after)  # empty where the weights are large
            what = "the weights are large" if large else "a factor" if factor else "a factor, or large weights"
            cause = f"Most is gained between layers {after} and {layer}: {what}."
            remedy = f"nn.init.kaiming_normal_ for the weights of layer {after}, and no constant factor before it."
            remedy = factor or remedy
        else:
            cause, remedy = _why_gradual(history, found.strong, found.dex / (len(names) - 1), onset, from_start)
            remedy = remedy or rate_remedy(history, back=onset)
        strong, text = layout.names(np.sort(found.strong)), f"{message} {cause}"
        headline = f"{ratio_text(found.dex)} times stronger than {sites_text(names[-1:])}"
        if change.abrupt and not around_norms:
            headline = f"the {now.quantity} grows {ratio_text(found.dex)} times, most behind layer {layer}"
        return Finding(self.name, severity, layer, strong, found.dex, dex, text, remedy, onset, headline)

    def _starts_large(self, history: History) -> Finding | None:
        """The last outputs have been far over the inputs since the first step, and the loss with them, by the weights
        of most layers: too little depth for what `_over_depth` compares. Where a norm follows, the loss is small.
        """
        layout, found, losses = history.layout, own_samples(history, "output_rms"), history.scalar("loss", len(history))
        ran = in_run_order(history, layout.layers)
        if found is None or len(found[0]) < self.records or not len(ran) or has_norm_layers(layout):
            return None
        outputs, backs = found[0][:, ran[-1]], found[1]
        inputs = np.fmax.reduce(history.at("input_rms", backs)[:, layout.layers], axis=1, initial=1.0)
        far = np.isfinite(outputs) & (outputs >= 10.0**self.activation_dex * inputs)
        far &= losses[-backs] >= LOSS_SHARE * outputs
        if not far.all() or not is_first_record(history, int(backs[0])):
            return None
        made = layout.without_class(ran, "Embedding")
        sizes = np.array([weights_over_usual(history, int(site)) for site in made])
        if not (sizes >= LARGE_RATIO).any():
            return self._multiplied(history, ran, inputs, backs, losses[-1])
        if not np.median(sizes) >= LARGE_RATIO:
            return None
        names, value = layout.names(np.sort(made[sizes >= LARGE_RATIO])), float(np.log10(outputs[-1] / inputs[-1]))
        largest, last = layout.names([made[sizes.argmax()], ran[-1]])
        size, loss = number_text(sizes.max()), number_text(losses[-1], 3)
        message = (
            f"The outputs of layer {last} have a root mean square of {number_text(outputs[-1])} since the first step, "
            f"and the loss is {loss}. The weights of {name_text(names)} are {'up to ' * (len(names) > 1)}{size} times "
            "as large as is usual at the start of a training, and there is no norm."
        )
        headline = f"its weights are {size} times the usual ones, and the loss is {loss}"
        remedy, onset = f"nn.init.kaiming_normal_ for the weights of {name_text(names)}.", int(backs[0])
        limit = self.activation_dex
        return Finding(self.name, Severity.WARNING, largest, names, value, limit, message, remedy, onset, headline)

    def _multiplied(self, history: History, ran: Sites, inputs: Floats, backs: Sites, loss: float) -> Finding | None:
        """The finding of `_starts_large` where all weights are usual, and no biases make the outputs: what stands
        between layers multiplies, most often a sum over many.
        """
        layout, outputs = history.layout, history.row("output_rms")
        pairs = [pair for pair in layout.edges or pairwise(ran.tolist()) if pair[1] and not bias_text(history, pair[1])]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.array([outputs[after] / outputs[before] for before, after in pairs])
        far = np.flatnonzero(ratios >= MULTIPLIED_RATIO)
        if not len(far) or not np.isfinite(ratios[far]).all():
            return None
        furthest = far[ratios[far].argmax()]
        before, after = layout.names(pairs[furthest])
        names = layout.names(sorted({pairs[place][1] for place in far}))
        last, size = layout.sites[int(ran[-1])].name, float(outputs[ran[-1]])
        ratio, lost = number_text(ratios[furthest]), number_text(loss, 3)
        by = "a factor, or a sum over many, such as all neighbours in a graph"
        remedy = (
            f"a mean in place of the sum, or an adjacency matrix that is normalized, before {name_text(names)}; or no "
            "factor, or nn.LayerNorm there."
        )
        if layout.sites[pairs[furthest][0]].module == "Embedding":
            by = "other inputs that join there, as columns of large numbers, a sum over many, or a factor"
            them = name_text(names)
            remedy = f"(x - mean) / std for what joins the embeddings before {them}; or a mean in place of a sum there."
        message = (
            f"The outputs of layer {last} have a root mean square of {number_text(size)} since the first step, and the "
            f"loss is {lost}, although the weights are not large. Outputs grow most from layer {before} to layer "
            f"{after}, {ratio} times: by {by}; and there is no norm."
        )
        headline = f"its outputs are {ratio} times those of layer {before}, and the loss is {lost}"
        value, limit, onset = float(np.log10(size / inputs[-1])), self.activation_dex, int(backs[0])
        return Finding(self.name, Severity.WARNING, after, names, value, limit, message, remedy, onset, headline)


def _why_gradual(
    history: History, strong: NDArray[np.intp], dex_per_layer: float, onset: int, from_start: bool
) -> tuple[str, str]:
    """The likely cause of a signal that grows layer by layer, to those that are `strong`, and what to change; that is
    empty where it is the rate.
    """
    layout, grows = history.layout, f"It grows gradually, by {ratio_text(dex_per_layer)} times a layer"
    modules = layout.modules
    if modules & RECURRENT_MODULES:
        cause = f"{grows}: recurrent weights amplify."
        return cause, "nn.init.orthogonal_ for weight_hh, and gradient clipping."
    if any(name.startswith("BatchNorm") for name in modules):
        cause = (
            f"{grows}: batch norm amplifies in deep plain networks (Yang et al. 2019), and where a batch has few "
            "numbers of a channel."
        )
        return cause, "residual connections around the layers: x + layer(x); with small batches, nn.GroupNorm instead."
    if has_norm_layers(layout):
        return f"{grows}, {norms_text(layout)}.", "smaller initial weights." if from_start else ""
    over_usual = median_over_usual(history, strong)
    if over_usual <= PRESERVING_RATIO:
        cause = f"{grows}, though the weights are not large, and there is no norm."
        return cause, "a normalisation layer between the layers, and no constant factor there."
    often = "most often " * bool(np.isnan(over_usual))
    change = median_weight_change(history, strong, onset)
    if not from_start and not change < UNGROWN_WEIGHTS_RATIO:  # also where it is not known
        return f"{grows}: {often}the weights have become too large, and there is no norm.", ""
    which = "initial weights" if from_start else "weights"
    cause = f"{grows}: {often}the {which} are too large, and there is no norm."
    return cause, "nn.init.kaiming_normal_ for the weights."
