"""Dead units: a ReLU that gives nothing but zeros, or whose units never fire again, and passes no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Effect, Finding, Severity, name_text
from gradwatch.core.history import History
from gradwatch.core.loss_levels import LOWER_LOSS_SHARE
from gradwatch.core.number_text import number_text
from gradwatch.core.record import MEASURED, Floats, Mask, Site, Sites
from gradwatch.rules.evidence.baseline import LEVEL_RECORDS, first_and_last_loss
from gradwatch.rules.evidence.jumps import began_text, beginning
from gradwatch.rules.evidence.layer_levels import (
    UNSCALED_INPUT_RMS,
    bias_text,
    biases_of,
    latest,
    parameters_of_kind,
    series_of,
    weights_of,
)
from gradwatch.rules.evidence.learning_rates import measured_remedy
from gradwatch.rules.evidence.paths import Paths, paths
from gradwatch.rules.evidence.recent_rows import ROUNDING, RecentRows
from gradwatch.rules.evidence.records import is_first_record, is_own, own_records
from gradwatch.rules.evidence.samples import (
    FIRST_SAMPLES,
    RECENT_RECORDS,
    forward_order,
    in_run_order,
    lasted,
    layer_before,
    layers_before,
    onset_of,
    own_samples,
)
from gradwatch.rules.evidence.wording import percent_text, steps_text
from gradwatch.rules.rule import CheckedRule

GRADIENT_LOOKBACK = 200
"""Records before the zeros among which the layer must have had a gradient that then became zero. Judgement."""

VANISHED_SHARE = 1e-6
"""A gradient below this share of the strongest layer's that becomes zero has vanished: no dead units. Judgement."""

ENDS_SHARE = 0.5
"""Share of a bounded activation's outputs that lie at its ends from which these are named as the cause. Judgement."""

BIAS_GROWTH = 2.0
"""Times by which the biases have grown while the units died to be named. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead(CheckedRule):
    """A ReLU or ReLU6 gives nothing but zeros, or nine tenths of its units are off for good.

    Without forward statistics (activations off, functional ReLUs, compiled regions), and between their samples, it goes
    by the gradients: those of all layers up to some depth, or of some on a way beside a skip connection, which were not
    faint, are exactly zero from one step on, while layers after them get one.
    """

    name: ClassVar[str] = "dead"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm", "zero_share", "idle_units", "dead_units", "run_order"})

    samples: int = 3
    """Samples in a row with only zeros; or one such sample, and as many records without a gradient. Prototype."""
    few_samples: int = 10
    """The same if a batch has so few outputs per unit that all of them may be zero by chance. As in `Vanishing`."""
    dead_share: float = 0.9
    """Share of the units that do not fire. Prototype."""
    records: int = 20
    """Records for which these units do not fire, or for which a gradient is exactly zero. Prototype."""

    def suspects(self, rows: RecentRows) -> Mask:
        """Some gradients are zero and others not, or a sample has such an activation."""
        lowest, highest = rows.range_over_layers("grad_norm")
        suspected = (lowest == 0) & (highest > 0)
        for statistic, share in (("zero_share", 1.0), ("dead_units", self.dead_share)):
            if statistic in rows.fresh:
                suspected |= (rows.values(statistic)[:, rows.layout.activations] >= share).any(axis=1)
        return np.asarray(suspected)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if not len(history):
            return None
        gradients = self._gradients(history)
        if died := self._gradient_died(history, *gradients) or self._gradient_ended(history, *gradients):
            return [died]
        zeros = own_samples(history, "zero_share")
        if zeros is None:
            return [] if history.newest("zero_share") > len(history) else None
        silent = self._all_zero(history, *zeros)
        if len(silent):
            return [self._silent(history, silent, *zeros)]
        return self._mostly(history)

    def _gradients(self, history: History) -> tuple[Sites, Floats, Floats]:
        """The layers that have a gradient, in forward order; their norms before the last `records`, and at these."""
        order, span = forward_order(history.layout), self.records + GRADIENT_LOOKBACK
        order = order[history.codes(1)[0, order] == MEASURED]
        norms = history.window("grad_norm", span)[is_own(history, span)][:, order]
        return order, norms[: -self.records], norms[-self.records :]

    def _gradient_died(self, history: History, order: Sites, early: Floats, late: Floats) -> Finding | None:
        """All layers up to some depth have had a gradient of exactly zero since one step, those after it have one."""
        depth = int(np.argmax(late[-1] > 0)) if len(order) else 0
        if not depth or not len(early):
            return None
        if (late[:, :depth] != 0).any() or not (late[:, depth:] > 0).any(axis=1).all():
            return None
        alive = (early[:, :depth] > VANISHED_SHARE * early.max(axis=1, keepdims=True)).all(axis=1)
        before = np.flatnonzero((early[:, :depth] > 0).any(axis=1))
        if not len(before) or not alive[before[-1]]:
            return None
        return self._without_gradient(history, order[depth - 1 : depth], order[: depth - 1], int(order[depth]))

    def _gradient_ended(self, history: History, order: Sites, early: Floats, late: Floats) -> Finding | None:
        """Layers that had a gradient at every record have had one of exactly zero since one step, while those next
        after them have one: another way, a skip connection for one, leads around them.
        """
        if history.layout.edges is None or len(early) < self.records:
            return None
        ended, going = np.asarray((late == 0).all(axis=0)), np.asarray((late > 0).all(axis=0))
        if not ended.any() or not going.any():
            return None
        # what is not reached in some batches, as experts are, may not be for longer
        already = (early[::-1] != 0).argmax(axis=0)  # zeros at its end
        had = np.arange(len(early))[::-1, None] >= already
        floor = VANISHED_SHARE * early.max(axis=1, keepdims=True)
        ended &= ((early > floor) | ~had).all(axis=0) & (had.sum(axis=0) >= self.records)
        flow = paths(history.layout, order)
        ends = [place for place in np.flatnonzero(ended).tolist() if flow.after[place]]
        ends = [place for place in ends if all(going[after] for after in flow.after[place])]
        if not ends:
            return None
        passed = {place: _passed_by(flow, going, place) for place in ends}
        ends = [place for place in ends if passed[place] is None] or ends
        first = max(ends, key=lambda place: (int(already[place]), place))
        before = flow.above(np.isin(np.arange(len(order)), ends)) & ended
        before[ends] = False
        dead, nearest = order[[*(place for place in ends if place != first), first]], int(order[flow.after[first][0]])
        # where what comes after gets zeros, no unit fires, and a way around that is not known leads to the others
        place = None if _gets_zeros(history, nearest) else passed[first]
        fed = None if place is None else int(order[place])
        return self._without_gradient(history, dead, order[before], nearest, fed=fed)

    def _without_gradient(
        self, history: History, dead: Sites, starved: Sites, nearest: int, *, fed: int | None = None
    ) -> Finding:
        """`dead`: layers whose gradient is 0, the one to name last; `starved`: those that lie before them; `nearest`:
        the one after them that has a gradient; `fed`: one before them that has one through the last alone.
        """
        site, severity = int(dead[-1]), self._severity(history)
        onset = zero_onset(history, site)
        assert onset is not None, "it is 0 at the latest record"
        death = death_of(history, site, onset)
        name, after = death.layer, history.layout.sites[nearest].name
        too = f", and of {_before_text(history.layout.names(starved))}," if len(starved) else ""
        if fed is not None:
            cause, remedy = _why_masked(history, site, onset, fed)
        elif (no_inputs := _why_without_inputs(history, site, onset, starved)) is not None:
            (cause, remedy), severity = no_inputs, Severity.WARNING
        elif (bounded := _bounded_after(history, site, onset)) is not None:
            cause, remedy = _why_after_bounded(history, *bounded, site, onset)
        else:
            cause, remedy = f"most often no unit after layer {name} fires any more. {death.cause}", death.remedy
        message = (
            f"The gradient of layer {name}{too} has been exactly 0 for {steps_text(history, self.records)} or more, "
            f"while layer {after} after it gets one: {cause}"
        )
        headline = f"it gets no gradient any more{death.headline(len(starved))}"
        sites, effects = history.layout.names(np.sort(dead)), _effects(history, starved=starved)
        return Finding(self.name, severity, name, sites, 0.0, 0.0, message, remedy, onset, headline, effects)

    def _severity(self, history: History) -> Severity:
        """The run is lost where no layer but those after the zeros has a gradient left."""
        order = forward_order(history.layout)
        measured = order[history.codes(1)[0, order] == MEASURED]
        lost = len(measured) and history.row("grad_norm")[measured[0]] == 0
        return Severity.ERROR if lost else Severity.WARNING

    def _all_zero(self, history: History, shares: Floats, backs: Sites) -> Sites:
        """The activations that give nothing but zeros. `shares`: of zeros, at the samples `backs`."""
        activations, nothing = history.layout.activations, shares == 1
        # without a unit known to be idle the batch is small, and its outputs may be zero by chance
        small = np.isnan(history.row("idle_units"))
        often = lasted(nothing, backs, samples=self.samples, records=1)
        often &= ~small | lasted(nothing, backs, samples=self.few_samples, records=1)
        # samples may be far apart, and the gradient was seen to be zero all the while
        norms = history.window("grad_norm", self.samples)
        unreached = (norms == 0).all(axis=0) & (len(norms) == self.samples)
        doubtful = activations[(nothing[-1] & ~small & ~often)[activations]].tolist()
        often[[site for site in doubtful if unreached[layer_before(history, site)]]] = True
        return activations[often[activations]]

    def _silent(self, history: History, sites: Sites, zeros: Floats, backs: Sites) -> Finding:
        """The activations `sites` give nothing but zeros."""
        fed = np.array([_fed_zeros(history, layer_before(history, site)) for site in sites.tolist()])
        sites, follow = (sites, sites[:0]) if fed.all() else (sites[~fed], sites[fed])
        activation, layer, onset = _origin(history, sites, zeros == 1, backs)
        layers, names = layers_before(history, sites), history.layout.names
        after = np.setdiff1d(layers_before(history, follow), layers)
        dead = np.concatenate([layers, after])
        starved = _starved_by(history, dead)
        death = death_of(history, layer, onset, dead=np.sort(layers))
        before = names(np.setdiff1d(_starved_by(history, np.array([layer])), dead))
        passes = "no gradient passes it"
        if zero_onset(history, layer) is not None:
            also = f" and {_before_text(before)} get" if before else " gets"
            passes += f": layer {death.layer}{also} none"
        message = (
            f"The {activation.module} {activation.name} after layer {death.layer} gives nothing but zeros, and "
            f"{passes}. {death.cause}"
        )
        if others := names(np.setdiff1d(layers, layer)):
            message += f" The units after {name_text(others)} give nothing but zeros as well."
        if len(after):
            message += (
                f" The units after {name_text(names(after))} give nothing but zeros because they get nothing else."
            )
        headline = f"its {activation.module} gives only zeros{death.headline(len(before))}"
        effects = _effects(history, dead=after, starved=starved)
        severity, where = self._severity(history), names(np.sort(layers))
        return Finding(
            self.name, severity, death.layer, where, 1.0, 1.0, message, death.remedy, onset, headline, effects
        )

    def _mostly(self, history: History) -> Sequence[Finding]:
        """Most units of an activation have not fired for long."""
        units, dead = own_samples(history, "idle_units"), own_samples(history, "dead_units")
        if units is None or dead is None:
            return []
        (idle, backs), share, layout = units, dead[0][-1], history.layout
        few = lasted(idle >= self.dead_share, backs, samples=FIRST_SAMPLES, records=self.records)
        few &= share >= self.dead_share
        sites = layout.activations[few[layout.activations]]
        if not len(sites):
            return []
        activation, layer, onset = _origin(history, sites, idle >= self.dead_share, backs, gradients=False)
        death, limit = death_of(history, layer, onset), self.dead_share
        value = float(share[layout.index[activation.name]])
        percent = percent_text(value)
        message = (
            f"{percent} of the units of the {activation.module} {activation.name} after layer {death.layer} have not "
            f"fired for any example of the sampled batches in {steps_text(history, self.records)}, and get no gradient "
            f"there. {death.cause}"
        )
        headline = f"{percent} of the units of its {activation.module} never fire{death.headline()}"
        names = layout.names(np.sort(layers_before(history, sites)))
        return [
            Finding(
                self.name, Severity.WARNING, death.layer, names, value, limit, message, death.remedy, onset, headline
            )
        ]


def _passed_by(flow: Paths, going: Mask, place: int) -> int | None:
    """A layer with a gradient (`going`) that reaches the loss through the one at `place` alone, which has none."""
    own = np.arange(len(flow)) == place
    found = np.flatnonzero(flow.only_through(own) & going)
    return int(found[-1]) if len(found) else None


def _gets_zeros(history: History, layer: int) -> bool:
    """Whether the gradient of the weights of `layer` is 0 and that of its bias is not: so it is if its inputs are 0."""
    weights, biases = (parameters_of_kind(history.layout, layer, bias=bias) for bias in (False, True))
    norms = history.row("grad_norm")
    return bool(len(weights) and (norms[weights] == 0).all() and (norms[biases] > 0).any())


def zero_onset(history: History, site: int) -> int | None:
    """The first record since which the gradient of `site` has been exactly 0, of those of this optimizer that have it;
    None where it is not 0 at the latest.
    """
    own, norms = own_records(history), history.window("grad_norm", len(history), sites=site)
    if history.codes(1)[0, site] != MEASURED or norms[-1] != 0:
        return None
    own = own[history.codes(len(history))[-own, site] == MEASURED]
    return int(onset_of(norms[-own] == 0, own))


def _why_masked(history: History, site: int, onset: int, fed: int) -> tuple[str, str]:
    """Why the layer `site` has no gradient since the record `onset`, though the layer `fed` has one through it alone,
    and what to change.
    """
    name, before = history.layout.names([site, fed])
    cause = (
        f"what flows back passes it to layer {before}, so something makes its gradient 0, such as a clamp that its "
        f"weights have left.{began_text(history, onset)}"
    )
    return cause, f"for the weights of layer {name} torch.sigmoid, say, in place of a clamp, or no mask or hook."


def _why_without_inputs(history: History, site: int, onset: int, starved: Sites) -> tuple[str, str] | None:
    """Why the layer `site` has no gradient since the record `onset` where a signal reaches it, or may, and what to
    change: its inputs are all 0. None where none reaches it. `starved`: layers before it without a gradient.
    """
    layer, reached = history.layout.sites[site], (history.window("signal_norm", onset, sites=site) > 0).any()
    embeds = "Embedding" in layer.module
    if not reached and not (embeds and not history.has("signal_norm")):
        return None
    only = "its padding_idx" if embeds else "0"
    cause = f"{'a backward signal reaches it, so' if reached else 'most often'} its inputs are all {only}, or "
    cause += f"something makes its gradient 0.{began_text(history, onset)}{unlearnt_text(history)}"
    look = "nn.LeakyReLU before it." if len(starved) else "look at a batch as the DataLoader returns it."
    return cause, f"inputs of layer {layer.name} that are not all {only}: {look}"


def _bounded_after(history: History, layer: int, onset: int) -> tuple[Site, float] | None:
    """The Tanh, Sigmoid or the like that ran next after `layer`, when such outputs were last sampled, and which share
    of them lay at its ends; NaN where that was before the record `onset`.
    """
    (shares, backs), layout = history.samples("saturated", RECENT_RECORDS), history.layout
    if not len(backs):
        return None
    bounded = layout.activations[~np.isnan(shares[-1, layout.activations])].tolist()
    after = (site for site in bounded if layer_before(history, site, back=int(backs[-1])) == layer)
    known = shares[-1] if backs[-1] <= onset else np.full(len(layout), np.nan)
    return next(((layout.sites[site], float(known[site])) for site in after), None)


def _why_after_bounded(history: History, bounded: Site, share: float, layer: int, onset: int) -> tuple[str, str]:
    """Why no gradient passes the activation `bounded` after `layer` (a site) since the record `onset`, as far as
    samples since then tell, and what to change. `share`: of its outputs that lie at its ends; NaN where not known.
    """
    if share < ENDS_SHARE:
        cause = (
            f"most often what follows the {bounded.module} {bounded.name} makes it 0, such as a mask: "
            f"{percent_text(share)} of its outputs lie at its ends.{began_text(history, onset)}"
        )
        return cause, f"the outputs of {bounded.name} without what multiplies them by 0."
    name, how = history.layout.sites[layer].name, beginning(history, onset)
    rms = latest(series_of(history, "input_rms", layer)[own_records(history) <= onset])
    inputs = (
        f" The inputs of layer {name} have a root mean square of {number_text(rms, 3)}."
        if rms > UNSCALED_INPUT_RMS
        else ""
    )
    cause = (
        f"most often the outputs of the {bounded.module} {bounded.name} after layer {name} lie at its ends, where no "
        f"gradient passes.{how.began}{how.sentence}{inputs}{unlearnt_text(history)}"
    )
    if inputs or layer == forward_order(history.layout)[0]:
        normal = f"inputs of mean 0 and standard deviation 1 for layer {name}"
        return cause, f"{normal}, or {how.remedy or 'nn.LayerNorm after it.'}"
    return cause, f"nn.LayerNorm after layer {name}, or {how.remedy or 'a smaller lr in configure_optimizers.'}"


@dataclass(frozen=True, slots=True)
class Death:
    """What is known of how the units after a layer died."""

    layer: str
    cause: str
    """What the record tells of the time before, of the steps just before, and of the layer: sentences."""
    remedy: str
    when: str
    """When or by what, as the end of a clause: " since the first step"; empty where neither is known."""

    def headline(self, starved: int = 0) -> str:
        """When, why, or what it does to the `starved` layers before, as the end of a clause."""
        if self.when or not starved:
            return self.when
        return f"; {starved} layer{'s' * (starved > 1)} before get{'s' * (starved == 1)} no gradient"


def death_of(history: History, layer: int, onset: int, *, dead: Sites | None = None) -> Death:
    """How the units after `layer` (a site) died; at the record `onset` they first were.

    `dead`: all such layers, where there are more than this one.
    """
    how, from_start = beginning(history, onset), is_first_record(history, onset)
    reason, remedy = _why_dead(history, layer, onset, [layer] if dead is None else dead.tolist(), from_start=from_start)
    cause = f"{how.began}{how.sentence}{reason}{unlearnt_text(history)}".strip()
    return Death(history.layout.sites[layer].name, cause, how.remedy or remedy, how.headline)


def _why_dead(history: History, layer: int, onset: int, dead: Sequence[int], *, from_start: bool) -> tuple[str, str]:
    """What the weights and biases of `layer` say, as a sentence, and what to change, in it and others of `dead`."""
    layout, name = history.layout, history.layout.sites[layer].name
    norms = [site for site in dead if "Norm" in layout.sites[site].module]
    fill = "nn.init.ones_" if layer in norms else "nn.init.kaiming_uniform_"
    if latest(weights_of(history, layer)) == 0:
        alike = (site for site in dead if (site in norms) == (layer in norms))
        which = name_text(layout.names(site for site in alike if latest(weights_of(history, site)) == 0))
        return f" The weights of {which} are all zero.", f"{fill} for the weights of {which}, which are all zero."
    made, leaky = bias_text(history, layer, back=onset), f"nn.LeakyReLU after layer {name}."
    if not from_start and layer in in_run_order(history, history.layout.layers)[-1:]:
        leaky = f"no ReLU after layer {name}, the last one: it gives no negative number."
    if from_start and made:
        biased = layout.names(site for site in dead if bias_text(history, site))
        which = f"bias{'es' * (len(biased) > 1)} of {name_text(biased or [name])}"
        return made, f"nn.init.zeros_ for the {which}, or {leaky}"
    if from_start:
        return "", f"{fill} for the weights of layer {name}, or {leaky}"
    biases = biases_of(history, layer)
    bias, before = latest(biases), latest(biases[own_records(history) > onset])
    if bias >= BIAS_GROWTH * before:
        made = (
            f" The biases of layer {name} grew meanwhile, from a root mean square of {number_text(before)} to "
            f"{number_text(bias)}."
        )
    return made, measured_remedy(history, onset) or f"a smaller lr in configure_optimizers, with warm-up, or {leaky}"


def unlearnt_text(history: History) -> str:
    """' The loss is higher than at the start (2.31 -> 2.32).', empty where it is lower, or the start is not known."""
    if not history.whole or (levels := first_and_last_loss(history, LEVEL_RECORDS)) is None:
        return ""
    first, last = levels
    if not np.isfinite([first, last]).all() or last < first - LOWER_LOSS_SHARE * abs(first) * ROUNDING:
        return ""
    how = "higher than" if last > first else "as high as"
    return f" The loss is {how} at the start ({number_text(first, 3)} -> {number_text(last, 3)})."


def _before_text(names: Sequence[str]) -> str:
    """'the 24 layers before it' or 'layer fc0 before it', for the middle of a sentence."""
    return f"the {len(names)} layers before it" if len(names) > 1 else f"layer {names[0]} before it"


def _effects(history: History, **layers: Sites) -> tuple[Effect, ...]:
    """What follows, by name, in which layers."""
    return tuple(Effect(what, history.layout.names(where)) for what, where in layers.items() if len(where))


def _fed_zeros(history: History, layer: int) -> bool:
    """Whether `layer` gets nothing but zeros: its outputs are exactly 0, its weights are not."""
    outputs = latest(series_of(history, "output_rms", layer))
    return outputs == 0 and latest(weights_of(history, layer)) > 0


def _origin(
    history: History, sites: Sites, silent: Mask, backs: Sites, *, gradients: bool = True
) -> tuple[Site, int, int]:
    """Of the activations `sites`, the one that died first, of several the nearest to the loss; the site index of the
    layer before it; and the onset.

    `silent`: at which samples they were, shape [samples, sites]; `gradients`: whether no gradient passes them then.
    """
    onsets = onset_of(silent, backs)
    found: list[tuple[int, int, int]] = []
    for site in in_run_order(history, sites)[::-1].tolist():
        layer, onset, fired = layer_before(history, site), int(onsets[site]), backs[~silent[:, site]]
        zero = zero_onset(history, layer) if gradients else None
        if zero is not None and (not len(fired) or zero < fired[-1]):  # after the sample at which they last fired
            onset = zero
        found.append((onset, layer, site))
    onset, layer, site = max(found, key=lambda one: one[0])
    return history.layout.sites[site], layer, onset


def _starved_by(history: History, dead: Sites) -> Sites:
    """The layers before those of `dead` whose gradient is exactly 0 as well at the latest record."""
    order = forward_order(history.layout)
    before = paths(history.layout, order).above(np.isin(order, dead))
    none = (history.row("grad_norm")[order] == 0) & (history.codes(1)[0, order] == MEASURED)
    return np.setdiff1d(order[before & none], dead)
