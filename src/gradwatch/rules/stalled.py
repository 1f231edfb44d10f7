"""Stalled training: gradients are there, and no step changes the weights by more than their last digits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text
from gradwatch.core.history import OPENING, History
from gradwatch.core.median import median
from gradwatch.core.number_text import number_text
from gradwatch.core.record import MEASURED, TOTAL, Floats, Layout, Mask, Sites
from gradwatch.core.remaining_scale import remaining_scale
from gradwatch.rules.evidence.baseline import LEVEL_RECORDS, is_stuck
from gradwatch.rules.evidence.learning_rates import removed_scale
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import is_own
from gradwatch.rules.evidence.samples import RECENT_RECORDS, in_a_row, sample_backs
from gradwatch.rules.evidence.weights import relative_updates, update_samples, zeroed_by_interventions
from gradwatch.rules.evidence.wording import ratio_text, steps_text
from gradwatch.rules.rule import CheckedRule

ROUNDING_STEPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Least relative change of a weight of each narrow type: half its `torch.finfo(...).eps`."""

RISING_RATE_RECORDS = 10
"""Records within which a learning rate that rises has risen. Judgement."""


LOW_RATE = 1e-6
"""Learning rate that is too low for any usual optimizer. Judgement: fine-tuning goes down to 1e-6."""

USUAL_UPDATE = 1e-3
"""Update over the size of the weights that the remedy aims at. Measured, as in `rate_remedy`."""

RELIABLE_UPDATE = 1e-7
"""The same from which it tells the rate to try: rounding of float32 swallows a part of smaller ones."""

CLIPPED_SHARE = 1e-2
"""Share of a gradient's norm below which what has shortened it is the cause. Judgement."""

USUAL_CLIPPING = 1.0
"""A norm to which gradients are often clipped, as in Lightning's documentation."""

LOW_REACH = 1e-5
"""Learning rate times gradient over the size of the weights, in the layer where that is most, under which SGD stands
still in any precision. Prototype, as `Stalled.update`."""

HIGHER_RATE = "a higher lr in configure_optimizers."

SLOWER_DECAY = "a slower decay in configure_optimizers: a gamma nearer to 1, or a larger step_size or T_max."
"""Where the rate has fallen between epochs only: its schedule does not count steps."""

LOW_GRADIENT = 1e-3
"""Norm of the whole gradient that suggests a loss too small in scale, once nothing moves. Judgement."""

SMALL_EPS = 0.01
"""Share of the size of a gradient that is small enough for what an optimizer adds to it. Judgement."""

AVERAGED_ONCE = (
    "a loss that is averaged once, over the batch; or torch.optim.Adam(self.parameters()), whatever its scale."
)

UNUSED = "No optimizer step was seen that uses these gradients.", "no zero_grad() in on_before_optimizer_step."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled(CheckedRule):
    """The weights of all layers stand still: since the start, or for longer than they moved before."""

    name: ClassVar[str] = "stalled"
    needs: ClassVar[frozenset[str]] = frozenset(
        {"grad_norm", "arrived_norm", "grad_norm_clipped", "clip_factor", "weight_norm", "update_ratio"}
    )

    update: float = 1e-5
    """Update relative to the weights that no layer reaches. Prototype."""
    changed_share: float = 0.01
    """Share of bfloat16 or float16 weights that change, each by at least its last digit. Prototype."""
    other_share: float = 0.1
    """Share of those weights that may be in layers that do change, such as biases. Judgement."""
    records: int = 20
    """Steps of an optimizer for which its weights do not move. Prototype."""
    still_share: float = 0.5
    """Share of all its steps that these must be. Judgement: a schedule may end near zero."""
    gradient_share: float = 0.1
    """Share of its first level below which the gradient itself is gone: converged, or another fault. Judgement."""
    loss_share: float = 0.5
    """Share of its first level below which the loss counts as learnt, if the weights did move before. Judgement."""
    stuck_update: float = 1e-4
    """The same as `update` if the loss has not moved in 150 steps either. Judgement: fine-tuning has 3e-4."""
    starved_ratio: float = 300.0
    """Ratio of another optimizer's updates to those of the one that hardly moves. Judgement: critics have up to ten
    times the rate of their actors, a new head a hundred times that of a trained encoder."""
    starved_update: float = 1e-4
    """Update relative to the weights that such an optimizer does not reach. Judgement: fine-tuning has 3e-4."""
    starved_samples: int = 4
    """Samples of each optimizer, all of them since the start. Judgement: the rate must be constant."""

    def suspects(self, rows: RecentRows) -> Mask:
        """The step before moved no layer by enough; where optimizers take turns, any whose update is known."""
        history = rows.history
        if "update_ratio" not in rows.fresh:
            return rows.nowhere
        sampled = rows.fresh["update_ratio"]
        if not is_own(history, RECENT_RECORDS + rows.count + 1).all():
            return sampled
        backs = rows.count + 1 - np.flatnonzero(sampled)
        pulled = _pulled(history, backs)
        moving = self._moving(history, backs, pulled, max(self.update, self.stuck_update))
        suspected = sampled.copy()
        suspected[sampled] = (pulled.any(axis=1) & ~moving) | np.isnan(history.at("update_ratio", backs)[:, 0])
        return suspected

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if history.newest("update_ratio") != 2 or not len(backs := update_samples(history)):
            return None
        pulled = _pulled(history, backs[-1:])[0]
        if not pulled.any():
            return []
        if not self._moving(history, backs[-1:], pulled, self.update).any():
            return self._still(history, backs, pulled, self.update)
        moving = self._moving(history, backs[-1:], pulled, self.stuck_update).any()
        if not moving and (stuck := is_stuck(history)) is not False:
            found = self._still(history, backs, pulled, self.stuck_update)
            return found if stuck or not found else None
        return self._starved(history, backs, pulled)

    def _still(self, history: History, backs: Sites, pulled: Mask, update: float) -> Sequence[Finding] | None:
        """No layer has reached `update` for long; None where they may have moved for longer, before the history."""
        layout = history.layout
        moving = self._moving(history, backs, pulled, update)
        still = backs[len(backs) - int(in_a_row(~moving)) :]
        own = _records_of(history, backs[-1])
        stood = own[(own <= still[0]) & (own >= still[-1])]
        zeroed = zeroed_by_interventions(history, RECENT_RECORDS, layout.layers[pulled])[-stood].all(axis=1)
        steps = int(np.count_nonzero(~zeroed))
        # of the records that are forgotten as many were this optimizer's as of those that are known
        all_own = len(own) * history.count / min(len(history), RECENT_RECORDS)
        if steps < max(self.records, self.still_share * all_own):
            return [] if moving.any() or steps < self.records else None
        moved = relative_updates(history, still)[:, pulled]
        # in large models parameters take turns: each layer has to have been seen
        if np.isnan(moved).all(axis=0).any() or self._excused(history, own, moved_before=bool(moving.any())):
            return []
        most, limits = np.nanmax(moved, axis=0), self._limits(layout, update)[pulled]
        if not most.any() and _moved_between(history, still, layout.layers[pulled]):
            return []  # as where only some calls of `watch.step` precede a step
        stand = most < limits  # a small share of narrow weights may move
        if not stand.any():  # by turns all of them
            return []
        largest, limit = float(most[stand].max()), float(limits[stand].max())
        no_layer, no_weights = "any layer", "no weights"
        alone = len(own) == min(len(history), RECENT_RECORDS) and not layout.partial
        if not alone:  # those of another optimizer may have moved, and what is not watched
            no_layer = name_text(layout.names(layout.layers[pulled][stand]))
            no_weights = f"no weights of {no_layer}"
        elif movers := layout.names(layout.layers[pulled][~stand]):
            no_layer, no_weights = f"any layer but {name_text(movers)}", f"no weights but those of {name_text(movers)}"
        what = f"by more than {number_text(largest, 1)} of their size" if largest > 0 else "at all"
        cause, remedy = _why(history, own, still, largest)
        for_long = steps_text(history, steps)
        none = "none" if len(still) >= steps else f"none of the {len(still)} that were sampled"
        message = (
            f"Gradients are there, but in {for_long} {none} has changed the weights of {no_layer} {what}; "
            f"a thousandth is usual. {cause}"
        )
        sites = () if alone else layout.names(layout.layers[pulled])
        layer, onset = sites[0] if sites else TOTAL, int(stood[0])
        headline = f"in {for_long} {no_weights} have moved {what}"
        return [Finding(self.name, Severity.WARNING, layer, sites, largest, limit, message, remedy, onset, headline)]

    def _starved(self, history: History, backs: Sites, pulled: Mask) -> Sequence[Finding]:
        """Of several optimizers one hardly moves, since the start, and another does."""
        known = sample_backs(history, "update_ratio")
        optimizers = history.optimizers(RECENT_RECORDS)[-known]
        mine = optimizers[-1]
        if not history.whole or len(backs) < self.starved_samples or (optimizers == mine).all():
            return []
        own, rates = _records_of(history, backs[-1]), history.scalar("lr", RECENT_RECORDS)
        if history.has("lr") and rates[-own[-1]] != rates[-own[0]]:
            return []
        # a layer of which another optimizer moves a part does not stand still
        pulled = pulled & ~(relative_updates(history, known[optimizers != mine]) >= self.starved_update).any(axis=0)
        if not pulled.any():
            return []
        # NaN where a sample has none of these layers, or no finite weights
        most = float(np.fmax.reduce(median(relative_updates(history, backs)[:, pulled].T), initial=np.nan))
        others = [
            float(median(median(relative_updates(history, theirs).T)))
            for other in set(optimizers.tolist()) - {mine}
            if len(theirs := known[optimizers == other]) >= self.starved_samples
        ]
        furthest = float(np.fmax.reduce(others, initial=np.nan))
        if not 0 < most < self.starved_update or not furthest >= self.starved_ratio * most:
            return []
        layout, ratio = history.layout, furthest / most
        names = layout.names(layout.layers[pulled])
        rate = f" (lr={number_text(rates[-own[-1]])})" * history.has("lr")
        message = (
            f"The steps of {name_text(names)}{rate} move the weights by {number_text(most, 1)} of their size, those "
            f"of another optimizer by {ratio_text(np.log10(ratio))} times as much, since the start: this part of the "
            "model stands still while the other learns."
        )
        remedy = "learning rates of a similar size for all optimizers in configure_optimizers."
        headline = f"another optimizer moves its weights {ratio_text(np.log10(ratio))} times as far"
        limit, onset = self.starved_ratio, len(history)
        return [Finding(self.name, Severity.WARNING, names[0], names, ratio, limit, message, remedy, onset, headline)]

    def _moving(self, history: History, backs: Sites, pulled: Mask, update: float) -> Mask:
        """At the records `backs`, whether a layer of wide numbers moved, or layers with enough of the narrow ones."""
        layout, moved = history.layout, relative_updates(history, backs)
        grids, sizes = _grids(layout), layout.sizes[layout.layers]
        over = pulled & (moved >= self._limits(layout, update))
        room = (sizes * (pulled & (grids > 0) & ~np.isnan(moved))).sum(axis=1)
        return np.asarray((over & (grids == 0)).any(axis=1) | ((sizes * over).sum(axis=1) > self.other_share * room))

    def _limits(self, layout: Layout, update: float) -> Floats:
        """The update under which each layer stands still, shape [layers].

        If a share s of the weights moves by one digit each, their norm moves by sqrt(s) digits.
        """
        return np.asarray(np.maximum(update, _grids(layout) * self.changed_share**0.5))

    def _excused(self, history: History, own: Sites, *, moved_before: bool) -> bool:
        """Whether the rate is on its way up, the gradient is gone, or all was learnt before."""
        rates = history.scalar("lr", RECENT_RECORDS)
        if rates[-own[-1]] > np.fmin.reduce(rates[-own[-RISING_RATE_RECORDS:]]):
            return True
        gradient, losses = (
            _first_and_last_level(history.at("grad_norm", own)[:, 0]),
            history.scalar("loss", RECENT_RECORDS),
        )
        if not gradient[1] > self.gradient_share * gradient[0]:
            return True
        if not moved_before:
            return False
        loss = _first_and_last_level(losses[-own])
        return bool(loss[1] < self.loss_share * loss[0])


def _why(history: History, own: Sites, still: Sites, most: float) -> tuple[str, str]:
    """Why the steps are so short, at the samples `still`, and what to change. `most`: the largest update over the size
    of the weights.
    """
    back = int(still[-1])
    rate = float(history.number("lr", back=back))
    norm, left = (float(history.row(name, back=back)[0]) for name in ("grad_norm", "grad_norm_clipped"))
    scaled = bool(removed_scale(history, back=back))
    usual = "a usual lr in configure_optimizers: 1e-3 for Adam, or 0.1 for SGD."
    if most >= RELIABLE_UPDATE and rate > 0:
        better = rate * USUAL_UPDATE / most
        usual = f"lr={number_text(better, 1)} in configure_optimizers: a step would move the weights by a thousandth."
    unused = np.isnan(left) and np.isnan(history.number("closures", back=back)) and not most and not rate < LOW_RATE
    return (
        _why_rate(history, own, rate, usual)
        or (None if scaled else _why_clipped(history, still, norm, left))
        or (UNUSED if unused else None)
        or _why_narrow(history, back, rate)
        or ((f"The learning rate is {number_text(rate)}.", usual) if rate < LOW_RATE else None)
        or _why_small(history, back, left if scaled else norm)
        or ("The learning rate is too low for these gradients.", usual if most >= RELIABLE_UPDATE else HIGHER_RATE)
    )


def _why_rate(history: History, own: Sites, rate: float, usual: str) -> tuple[str, str] | None:
    """Where the rate is 0, or has fallen far."""
    rates = history.scalar("lr", RECENT_RECORDS)[-own]
    highest = float(np.fmax.reduce(rates))
    if rate < 1e-3 * highest:
        cause = (
            f"The learning rate has fallen from {number_text(highest)} to {number_text(rate)}: its schedule decays "
            "too fast."
        )
        epochs = history.scalar("epoch", RECENT_RECORDS)[-own]
        if np.isfinite(epochs).all() and not ((np.diff(rates) < 0) & (np.diff(epochs) == 0)).any():
            return cause, SLOWER_DECAY
        return cause, '{"scheduler": ..., "interval": "epoch"} for lr_scheduler in configure_optimizers.'
    return ("The learning rate is 0.", usual) if rate == 0 else None


def _why_clipped(history: History, still: Sites, norm: float, left: float) -> tuple[str, str] | None:
    """Where interventions or a clipping leave little of the gradient, after the measurement or before it."""
    back = int(still[-1])
    if left < CLIPPED_SHARE * norm:
        if np.isclose(left, norm * history.row("clip_factor", back=back)[0], rtol=0.01, atol=0.0):
            cause = f"The interventions leave {number_text(left)} of a gradient of norm {number_text(norm)}."
            return cause, "a larger limit or factor of what is in interventions."
        return _clipping(history, back, "Clipping", norm, left)
    if norm < LOW_GRADIENT and len(known := still[np.isfinite(history.at("arrived_norm", still)[:, 0])]):
        arrived, norms = (history.row(name, back=int(known[-1])) for name in ("arrived_norm", "grad_norm"))
        if norms[0] < CLIPPED_SHARE * arrived[0] and not remaining_scale(arrived, norms):
            what = "Clipping before the measurement, or other code after the backward pass,"
            return _clipping(history, int(known[-1]), what, float(arrived[0]), float(norms[0]))
    return None


def _why_narrow(history: History, back: int, rate: float) -> tuple[str, str] | None:
    """Where all weights are in half precision."""
    if not _grids(history.layout).all():
        return None
    cause = "The weights are in half precision, in which an update under half a unit in the last place is lost."
    remedy = 'Trainer(precision="bf16-mixed"), which keeps the weights in float32'
    layers = history.layout.layers
    with np.errstate(divide="ignore", invalid="ignore"):
        by_sgd = rate * history.row("grad_norm", back=back)[layers] / history.row("weight_norm", back=back)[layers]
    reach = float(np.max(by_sgd[np.isfinite(by_sgd)], initial=0.0))
    if not 0 < reach < LOW_REACH:
        return cause, f"{remedy}."
    named = number_text(rate * USUAL_UPDATE / reach, 1)
    return cause, f"{remedy}; with SGD lr={named}, too: a step would move the weights by a thousandth."


def _why_small(history: History, back: int, norm: float) -> tuple[str, str] | None:
    """Where the gradient is small, for an optimizer that adds `eps` to its size or takes it as it is."""
    eps, layout = history.number("eps", back=back), history.layout
    if not eps > 0:
        cause = (
            f"The gradient is small, its norm {number_text(norm)}: a loss that is averaged twice, or small in scale."
        )
        return (cause, AVERAGED_ONCE) if norm < LOW_GRADIENT else None
    size = norm / np.sqrt(sum(layout.sites[site].numel for site in layout.parameters))
    if not size < eps:
        return None
    cause = (
        f"The gradient is small, {number_text(size)} in the root mean square: below eps={number_text(eps)} of the "
        "optimizer, which divides it by the sum of its size and eps."
    )
    return cause, f"a loss of a larger scale, or eps={number_text(size * SMALL_EPS, 1)} in configure_optimizers."


def _clipping(history: History, back: int, what: str, norm: float, left: float) -> tuple[str, str]:
    """Where `what` leaves `left` of the gradient's `norm`: the cause, and what to change."""
    scaled = history.number("scaled", back=back) == 1
    said, unscaled = " without the loss scale" * scaled, ", without the loss scale" * scaled
    limit = f"Trainer(gradient_clip_val={USUAL_CLIPPING}), which is above the norm of the gradient"
    if norm >= USUAL_CLIPPING:
        limit = f"Trainer(gradient_clip_val={number_text(norm, 1)}), the norm of the gradient"
    return (
        f"{what} leaves {number_text(left)} of a gradient of norm {number_text(norm)}{said}.",
        f"{limit}{unscaled}.",
    )


def _records_of(history: History, sample: int) -> Sites:
    """The records of the optimizer of the record `sample`, oldest first."""
    optimizers = history.optimizers(RECENT_RECORDS)
    return len(optimizers) - np.flatnonzero(optimizers == optimizers[-sample])


def _pulled(history: History, backs: Sites) -> Mask:
    """Layers that had a gradient at the records `backs`, and kept it: shape [records, layers]."""
    layers, n = history.layout.layers, int(backs.max(initial=0))
    there = (history.codes(n)[-backs][:, layers] == MEASURED) & (history.at("grad_norm", backs)[:, layers] > 0)
    return np.asarray(there & ~zeroed_by_interventions(history, n, layers)[-backs])


def _moved_between(history: History, backs: Sites, layers: Sites) -> bool:
    """Whether weights of `layers` are others at some of the samples `backs`."""
    norms = history.at("weight_norm", backs)[:, layers]
    return bool((np.fmax.reduce(norms) > np.fmin.reduce(norms)).any())


def _first_and_last_level(series: Floats) -> tuple[float, float]:
    """The first level of a series and its latest, medians of the finite; NaN where there are none."""
    early, late = series[:OPENING], series[-LEVEL_RECORDS:]
    early, late = early[np.isfinite(early)][:LEVEL_RECORDS], late[np.isfinite(late)]
    return (float(np.median(early)), float(np.median(late))) if len(early) and len(late) else (np.nan, np.nan)


@lru_cache(maxsize=8)
def _grids(layout: Layout) -> Floats:
    """Least relative change of a weight of each layer, shape [layers]; 0 where any parameter is of a wide type."""
    grids = np.full(len(layout), np.inf)
    for site, owner in zip(layout.parameters, layout.owners, strict=True):
        grids[owner] = min(grids[owner], ROUNDING_STEPS.get(layout.sites[site].dtype, 0.0))
    return np.where(np.isinf(grids), 0.0, grids)[layout.layers]
