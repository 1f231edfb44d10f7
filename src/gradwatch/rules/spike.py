"""Spikes: a gradient that is, for one step, far out of the range of its layer's recent gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text
from gradwatch.core.history import OPENING, History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Mask, Sites
from gradwatch.rules.evidence.baseline import largest_first_loss, median_and_spread, per_full_accumulation
from gradwatch.rules.evidence.jumps import LARGE_UPDATE, batch_remedy, grew_alike, jump_text, largest_update
from gradwatch.rules.evidence.learning_rates import (
    SANE_SHARE,
    SCALED_CLIPPING,
    clipping_limit,
    may_be_scaled,
    rate_jump,
)
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import held_text, is_alone, is_own, is_whole
from gradwatch.rules.evidence.samples import FIRST_SAMPLES
from gradwatch.rules.evidence.weights import relative_updates, update_samples
from gradwatch.rules.evidence.wording import batch_text, capitalized, ratio_text, steps_text
from gradwatch.rules.rule import CheckedRule

QUICK_CHECK_RECORDS = 8
"""Records of a first, cheap comparison: a norm that is not far above one of them is not far above their maximum."""

FIRST_LEVEL_LOSSES = 10
"""Losses that make up the first level. As in `Divergence`."""

RECENT_LOSSES = 10
"""Losses before a spike with which its own is compared. Judgement."""

RISING_RECORDS = 5
"""Records before a spike in which its layer's gradient may have been rising. As `LEVEL_RECORDS`."""

RISEN_RATIO = 3.0
"""Ratio of their median to that of the window from which it has risen far. Measured: in a transformer whose attention
begins to learn, layers have 5 to 26 before they jump tenfold."""

RISING_JUMP = 30.0
"""Ratio of a spike to the highest norm before it, under which it may be part of a rise. Measured: 24 there."""

RISING_RATIO = 2.0
"""Ratio of the last of them to the first from which it still rises. Measured: 3 to 7 there."""

LOOKBACK_WINDOWS = 4
"""Windows of records in which a layer's own are searched where several optimizers take turns. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike(CheckedRule):
    """A layer's gradient norm jumps above all of its recent ones, and far out of their spread, for one step.

    That is known when the next step has come back. Where gradient or loss are beyond all that the untrained model had
    it is said at once: no shift in the data, which stays, takes a model there. Layers that had no gradient lately, as
    the head of another task, are left out of the whole model's. Layers whose gradient had been rising, and jumps and
    comes back while the loss is calm, are left out: so it does where a layer begins to learn.
    """

    name: ClassVar[str] = "spike"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm"})
    distrusts_records: ClassVar[bool] = True

    over_max_dex: float = 1.0
    """Decades above the highest norm of the window. Prototype."""
    sigmas: float = 6.0
    """Robust standard deviations of the log norm above the median of the window. Prototype."""
    floor_dex: float = 0.05
    """Least standard deviation, in decades. Prototype: with full batches it is near 0."""
    window: int = 100
    """Number of trusted records of a layer that make up its baseline. Prototype."""
    warm_up: int = 20
    """Trusted records needed for a judgement. Judgement: the first steps of a run vary most."""
    patience: int = 10
    """Spikes in a row after which the new level counts as normal. Judgement."""
    beyond: float = 30.0
    """Ratio of the total gradient or the loss to their highest at the start of the run from which the next step is not
    waited for. Judgement: a shift in the data makes it 10 (zoo)."""
    back_dex: float = 0.5
    """Decades above the highest norm of the window below which a gradient is back in range. Judgement: half of the
    way."""
    whole_share: float = 0.5
    """Share of the layers from which a spike is one of the whole model. Judgement."""
    total_share: float = 0.5
    """Share of the total norm below which layers that jumped are a notice. Judgement: without them the total is still
    0.87 of it."""
    opening_share: float = 1e-3
    """Share of the optimizer's lowest total norm at the start of the run below which a spike is a notice, because
    nearly all is learnt. Judgement: at the start gradients may vary a hundredfold."""

    def suspects(self, rows: RecentRows) -> Mask:
        """It, or its optimizer's record before it, has a layer that is so far over the few before: `_at` begins so."""
        history, n = rows.history, rows.count + QUICK_CHECK_RECORDS + 1
        norms, optimizers = per_full_accumulation(history, n), history.optimizers(n)
        sites, times = np.append(0, rows.layout.layers), 10.0**self.over_max_dex
        norms, trusted = norms[:, sites], history.trusted(n)[:, sites]
        usable = np.where(trusted & np.isfinite(norms), norms, 0.0)
        alone = (optimizers == optimizers[-1]).all()
        if alone and not ((norms[1:] > usable[:-1] * times) & (norms[1:] < np.inf)).any():
            return rows.nowhere
        level = np.zeros(norms.shape)
        for back in range(1, QUICK_CHECK_RECORDS + 1):
            same = (optimizers[back:] == optimizers[:-back])[:, None]
            np.maximum(level[back:], np.where(same, usable[:-back], 0.0), out=level[back:])
        risen = ((norms > level * times) & (norms < np.inf)).any(axis=1)
        suspected = risen.copy()
        for optimizer in set(optimizers.tolist()):
            own = (optimizers == optimizer).nonzero()[0]
            suspected[own[1:]] |= risen[own[:-1]]
            suspected[own[0]] = True  # the record before it is not among these
        return np.asarray(suspected[-rows.count :])

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if len(history) <= self.warm_up:
            return None
        if self._is_beyond(history) and (found := self._at(history, 1)):
            return found
        own = np.flatnonzero(is_own(history, LOOKBACK_WINDOWS * self.window)[::-1])
        return self._at(history, 1 + int(own[1]), returned=True) if len(own) > 1 else []

    def _is_beyond(self, history: History) -> bool:
        """Whether gradient or loss have left all that they were in the opening of the run."""
        before = history.window("grad_norm", OPENING, sites=0)[:-1]
        highest = history.opening[1] if len(history) > OPENING else before[np.isfinite(before)].max(initial=0.0)
        if history.total >= self.beyond * highest > 0:
            return True
        loss = abs(history.number("loss"))
        return np.inf > loss >= self.beyond * abs(largest_first_loss(history, FIRST_LEVEL_LOSSES)) > 0

    def _at(self, history: History, back: int, *, returned: bool = False) -> Sequence[Finding]:
        """What stood out of its own baseline at the record `back` from the end; `returned`: and does not at the latest
        any more.
        """
        if returned and _loss_stays(history, back, self.window):
            return []
        norms = per_full_accumulation(history, back)
        now, after, candidates = norms[-back], norms[-1], np.append(0, history.layout.layers)
        candidates = candidates[now[candidates] < np.inf]
        if returned:
            candidates = candidates[history.trusted(back)[0, candidates]]
        past, usable, trusted = self._past(history, back, candidates)
        base = trusted & _newest(trusted, self.window)
        last = usable & _newest(usable, self.patience)
        settled = (last.sum(axis=0) >= self.patience) & ~(last & trusted).any(axis=0)
        ceiling = np.where(base, past, 0.0).max(axis=0, initial=0.0)
        new = candidates[~usable.any(axis=0)]
        others = np.setdiff1d(history.layout.layers, new)
        height, later = (_total_of(others, row)[candidates] if len(new) else row[candidates] for row in (now, after))
        high = (height >= ceiling * 10.0**self.over_max_dex) & (base.sum(axis=0) >= self.warm_up) & ~settled
        if returned:
            high &= later <= ceiling * 10.0**self.back_dex
        median, sigma = median_and_spread(np.log10(np.where(base, past, np.nan)[:, high]))
        far = np.log10(height[high]) - median >= self.sigmas * np.maximum(sigma, self.floor_dex)
        if returned and far.any() and _is_calm(*_losses_around(history, self.window, back)):
            little = height[high] < RISING_JUMP * ceiling[high]
            far &= ~(little & _was_rising(past[:, high], base[:, high], 10.0**median))
        if not far.any():
            return []
        counts, sites = base.sum(axis=0)[high][far], candidates[high][far]
        return [self._finding(history, now, sites, ceiling[high][far], counts, back, returned=returned)]

    def _past(self, history: History, back: int, sites: Sites) -> tuple[Floats, Mask, Mask]:
        """The norms of `sites` at the optimizer's records before the one `back` from the end, which of them are there,
        and which of those are trusted: shape [records, sites] each.
        """
        span = self.window * (1 if is_own(history, self.window).all() else LOOKBACK_WINDOWS) + back
        own = _own(history, span, back)
        past = per_full_accumulation(history, span)[:-back][own][:, sites]
        usable = np.isfinite(past) & (past > 0)
        return past, usable, usable & history.trusted(span)[:-back][own][:, sites]

    def _finding(
        self, history: History, now: Floats, sites: Sites, ceiling: Floats, counts: Sites, back: int, *, returned: bool
    ) -> Finding:
        """`counts`: of the normal steps of each of `sites`, whose highest is its `ceiling`."""
        jumps = np.log10(now[sites] / ceiling)
        layers = sites[sites > 0]
        names = history.layout.names(layers)
        measured = history.layout.layers[np.isfinite(now[history.layout.layers])]
        whole = sites[0] == 0 and (not len(layers) or len(layers) >= self.whole_share * len(measured))
        worst = int(jumps[-len(layers) :].argmax()) + len(sites) - len(layers) if len(layers) else 0
        layer = history.layout.sites[sites[worst]].name
        shown = 0 if whole else worst
        who = "The whole model's gradient"
        if whole and not is_whole(history):
            who = f"The gradient of {name_text(history.layout.names(measured))}, {held_text(history)},"
        elif not whole:
            who = f"The gradient of {name_text(names)}"
        whose = "its norm" if whole or len(names) == 1 else f"that of layer {layer}"
        times = ratio_text(jumps[shown])
        normal = [steps_text(history, count, back=back + 1, kind="normal ") for count in counts.tolist()]
        where = f", in {len(layers)} of {len(measured)} layers" * (len(measured) > 1)
        if not len(layers):  # each by itself has been nearly as high, or has had too few gradients
            largest = history.layout.sites[measured[now[measured].argmax()]].name
            where = f", the largest part in layer {largest}"
        message = (
            f"{who} jumped{batch_text(history, back=back)}, {whose} to {number_text(now[sites[shown]])}, {times} "
            f"times the highest of its last {normal[shown]}{where}. "
        )
        # the gradient of a record was there before that record's rate moved anything
        if (jump := rate_jump(history, back=back + 1)) is not None:
            message += f"{capitalized(jump.text)}, just before."
            remedy, headline = jump.remedy, jump.text
        else:
            message += _loss_text(history, self.window, back, returned=returned)
            highest = f"the highest norm of the layer in {normal[worst]}"
            of_layer = f'interventions=[Clip({number_text(ceiling[worst])}, layers="{layer}")], {highest}.'
            remedy = _clipping_remedy(history, self.window, back, of_layer)
            headline = jump_text(batch_text(history, back=back), jumps[shown], normal[shown])
        height = float(jumps[worst])
        matters = sites[0] == 0 or np.linalg.norm(now[layers]) >= self.total_share * now[0]
        matters &= not now[0] < self.opening_share * _lowest_of_opening(history)
        severity = Severity.WARNING if matters else Severity.NOTICE
        return Finding(self.name, severity, layer, names, height, self.over_max_dex, message, remedy, back, headline)


def _own(history: History, n: int, back: int) -> Sites:
    """Which of the last `n` records before the one `back` from the end are of the latest optimizer."""
    return np.flatnonzero(is_own(history, n)[:-back])


def _lowest_of_opening(history: History) -> float:
    """The lowest total norm of the optimizer in the opening of the run; of all, where that has been forgotten."""
    if not history.whole or is_alone(history):
        return history.opening[0]
    early = history.series("grad_norm")[:OPENING][is_own(history, len(history))[:OPENING]]
    early = early[early > 0]
    return float(early.min()) if len(early) else history.opening[0]


def _loss_stays(history: History, back: int, window: int) -> bool:
    """Whether the loss went up with the gradient and has not come back since, half of the way at least."""
    losses = history.scalar("loss", window + back)
    if not np.isfinite(losses[:-back]).any():
        return False
    before = losses[:-back][np.isfinite(losses[:-back])]
    then, now, highest = losses[-back], losses[-1], before.max()
    return bool(then > highest and not now <= max(highest, (then + np.median(before)) / 2))


def _was_rising(past: Floats, base: Mask, medians: Floats) -> Mask:
    """Of which sites the newest norms of the baseline `base` are far above its median, one of `medians` each, and still
    rise: shape [sites]. `past`: shape [records, sites].
    """
    enough = base.sum(axis=0) >= RISING_RECORDS
    newest = (base & _newest(base, RISING_RECORDS))[:, enough]
    late = past[:, enough].T[newest.T].reshape(-1, RISING_RECORDS)
    risen = np.median(late, axis=1) >= RISEN_RATIO * medians[enough]
    rising = np.zeros(len(enough), dtype=bool)
    rising[enough] = risen & (late[:, -1] >= RISING_RATIO * late[:, 0])
    return rising


def _total_of(layers: Sites, norms: Floats) -> Floats:
    """`norms`, shape [sites], with the total of `layers` alone."""
    return np.concatenate([[np.sqrt(np.nansum(np.square(norms[layers])))], norms[1:]])


def _newest(mask: Mask, n: int) -> Mask:
    """Which of the True in each column of `mask` [records, sites] are among its newest `n`."""
    return np.asarray(np.cumsum(mask[::-1], axis=0)[::-1] <= n)


def _clipping_remedy(history: History, window: int, back: int, of_layer: str) -> str:
    """The remedy: clipping at the highest trusted total norm of the window before the record `back` from the end; the
    clipping `of_layer` where the total at that record is no higher, and would not be clipped.
    """
    norms, own = history.window("grad_norm", window + back), _own(history, window + back, back)
    totals = norms[own, 0]
    normal = totals[history.trusted(window + back)[own, 0] & np.isfinite(totals) & (totals > 0)]
    highest = float(normal.max(initial=0.0))
    if (limit := clipping_limit(history)) is not None and limit <= highest:
        return batch_remedy(batch_text(history, back=back), limit)
    if may_be_scaled(history):
        return SCALED_CLIPPING
    if not highest > 0:
        return "Trainer(gradient_clip_val=...), with the usual norm of the gradient."
    if norms[-back, 0] <= highest:
        return of_layer
    steps = steps_text(history, len(normal), back=back + 1, kind="normal ")
    whose = "the whole model" if is_whole(history) else held_text(history)
    now = f"; clipping left norms of up to {number_text(limit)} lately" if limit is not None else ""
    return f"Trainer(gradient_clip_val={number_text(highest)}), the highest norm of {whose} in {steps}{now}."


def _losses_around(history: History, window: int, back: int) -> tuple[Floats, float]:
    """The finite losses of the optimizer in the window before the record `back` from the end, and the loss there; none,
    and NaN, where one of the two is not known.
    """
    losses = history.scalar("loss", window + back)[_own(history, window + back, back)]
    before, now = losses[np.isfinite(losses)], history.number("loss", back=back)
    return (before, now) if np.isfinite(now) and len(before) else (before[:0], np.nan)


def _is_calm(before: Floats, now: float) -> bool:
    """Whether the loss is known `now`, and in the range of those `before`."""
    if not len(before):
        return False
    # a loss that falls is highest at the start of the window, far above the recent ones
    lately = before[-RECENT_LOSSES:]
    return not now > min(before.max(), 2 * lately.max() - lately.min())


def _loss_text(history: History, window: int, back: int, *, returned: bool) -> str:
    """What the loss did at that record, and where to look. `returned`: the gradient has come back since."""
    before, now = _losses_around(history, window, back)
    if not len(before):
        return "Look at this batch's inputs, targets and weights in the loss."
    last = _last_update(history, back)
    sampled = f"The last that was sampled moved the weights by {number_text(last)} times their size."
    usual, own = float(np.median(before[-RECENT_LOSSES:])), is_own(history, back + 1)
    shown, reached = number_text(usual, 3), number_text(now, 3)
    rose = shown != reached and now > before[-RECENT_LOSSES:].max()
    if not rose or _is_calm(before, now):
        look = "The loss did not: look for a division or square root near 0 in the backward pass"
        if rose:
            look = f"The loss went from {shown} to {reached}: look at this batch's inputs and targets"
        return f"{look}, or for steps that are too large. {sampled}" if last >= SANE_SHARE else f"{look}."
    jumped = f"The loss jumped too, from {shown} to {reached}"
    moved = largest_update(history, back + 1) if own[0] else np.nan
    if moved >= LARGE_UPDATE:
        return (
            f"{jumped}, after a step that moved the weights by {number_text(moved)} times their size: steps are too "
            "large."
        )
    if last >= SANE_SHARE:
        return f"{jumped}: most often a bad batch, wrong targets, a loss weight, or steps that are too large. {sampled}"
    if grew_alike(history, back):
        jumped += ", by about the same factor as the gradients of all layers"
        often = "most often a sum in place of a mean or another weight in the loss, a bad batch or wrong targets"
        return f"{jumped}: {often}."
    if returned or moved < LARGE_UPDATE:
        return f"{jumped}: most often a bad batch, wrong targets or a loss weight."
    return f"{jumped}: most often a bad batch, wrong targets, a loss weight, or steps that are too large."


def _last_update(history: History, back: int) -> float:
    """The largest update of a layer over the size of its weights, at the newest sample of this optimizer before the
    record `back` from the end, without the first samples; NaN where there is none.
    """
    backs = update_samples(history)
    backs = backs[(backs > back) & (backs <= len(history) - FIRST_SAMPLES)]
    if not len(backs):
        return float("nan")
    return float(np.fmax.reduce(relative_updates(history, backs[-1:])[0], initial=np.nan))
