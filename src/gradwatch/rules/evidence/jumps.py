"""What came just before a fault, and so may have made it: a jump of the learning rate, or else of the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.rules.evidence.learning_rates import (
    EFFECT_RECORDS,
    SCALED_CLIPPING,
    RateJump,
    clipping_limit,
    may_be_scaled,
    rate_jump,
)
from gradwatch.rules.evidence.records import is_first_record, is_own, own_records
from gradwatch.rules.evidence.wording import batch_text, ratio_text, steps_text

OVERFLOW_RECORDS = 10
"""Records from a jump to an overflow of the weights, at most. Judgement."""

BASELINE_RECORDS = 20
"""Records before a jump with which the gradient is compared: as many as `Spike` needs for a judgement."""

JUMP_RATIO = 10.0
"""Ratio to the highest gradient before from which a gradient is a jump. As in `Spike`."""

COMMON_RATIO = 3.0
"""Ratio up to which the growth of a layer's gradient is that of the loss, and from which the loss has jumped.
Judgement: the norms of single batches differ by 2."""

GROWING_RATIO = 2.0
"""Times the median before it from which a gradient that is the highest so far is growing already. Judgement."""

LARGE_UPDATE = 0.3
"""Update over the size of the weights that throws them. Judgement: `Divergence` fires at 3; after the first steps
healthy runs of the zoo have 0.05."""


@dataclass(frozen=True, slots=True)
class GradientJump:
    """A gradient norm far over those of the steps before it."""

    back: int
    """Records from the end; 1 is the latest."""
    ratio: float
    """The norm over `highest`."""
    highest: float | None
    """The highest norm before it; None where it may hold a loss scale."""
    steps_before: str
    """'20 steps': how many records before it `highest` is of."""
    step: int | None
    """The step at which it was; None for the latest record, which an alert is about anyway."""
    batch: str
    """' at batch 17 of epoch 2', as far as that is known."""
    threw: bool
    """Whether its step is known to have moved the weights far, and the step before it not to have."""
    limit: float | None
    """The norm to which gradients are clipped already; None where they are not."""

    @property
    def text(self) -> str:
        """'the gradient at batch 17 of epoch 2 was 50 times the highest of the 20 steps before'."""
        return jump_text(self.batch, float(np.log10(self.ratio)), self.steps_before)

    @property
    def cause(self) -> str:
        """A sentence, without a capital."""
        when = self.batch
        if self.step is not None:
            when = f"{when}, at step {self.step}," if when else f" at step {self.step}"
        times = ratio_text(np.log10(self.ratio))
        jumped = f"the gradient{when} was {times} times the highest of the {self.steps_before} until then"
        return f"{jumped}: that one batch threw the weights far off." if self.threw else f"{jumped}."

    @property
    def remedy(self) -> str:
        if self.limit is not None:
            return batch_remedy(self.batch, self.limit)
        if self.highest is None:
            return SCALED_CLIPPING
        value = f"Trainer(gradient_clip_val={number_text(self.highest)})"
        return f"{value}, the highest norm of the {self.steps_before} before it."


def jump_text(batch: str, dex: float, steps: str) -> str:
    """'the gradient at batch 17 of epoch 2 was 50 times the highest of the 20 steps before'; `dex`: by how many
    decades; `steps`: '20 steps'.
    """
    return f"the gradient{batch} was {ratio_text(dex)} times the highest of the {steps} before"


def batch_remedy(batch: str, limit: float) -> str:
    """The remedy where gradients are clipped to the norm `limit` already."""
    what = f"what came in{batch}" if batch else "that batch"
    return f"a look at {what}; gradients are clipped to a norm of {number_text(limit)} already."


def gradient_jump(history: History, *, back: int = 1, of: int = 1) -> GradientJump | None:
    """The first jump among the `OVERFLOW_RECORDS` records up to the one `back` from the end, compared with the
    `BASELINE_RECORDS` records before it, of the optimizer of the record `of`; None where there is none, or too few
    records.
    """
    n = BASELINE_RECORDS + OVERFLOW_RECORDS + back
    norms, own = history.window("grad_norm", n, sites=0), np.flatnonzero(is_own(history, n, of=of))
    totals, backs = norms[own], len(norms) - own
    for place in np.flatnonzero((backs >= back) & (backs < back + OVERFLOW_RECORDS)):
        earlier = totals[max(0, place - BASELINE_RECORDS) : place]
        earlier = earlier[np.isfinite(earlier)]
        if len(earlier) < BASELINE_RECORDS // 2 or not np.isfinite(totals[place]):
            continue
        highest, median = float(earlier.max()), float(np.median(earlier))
        # a gradient that was growing before is no jump
        growing = highest > median * JUMP_RATIO or (earlier[-1] == highest and highest > median * GROWING_RATIO)
        if growing or not 0 < highest * JUMP_RATIO <= totals[place]:
            continue
        last, moved = (largest_update(history, int(backs[at])) for at in (place - 1, place))
        if last >= LARGE_UPDATE:
            continue
        gone, ratio = int(backs[place]), float(totals[place]) / highest
        batch, limit = batch_text(history, back=gone), clipping_limit(history, of=of)
        before = steps_text(history, len(earlier), back=gone + 1)
        step, threw = history.steps[-gone] if gone > 1 else None, moved >= LARGE_UPDATE > last
        known = None if may_be_scaled(history) else highest
        return GradientJump(gone, ratio, known, before, step, batch, threw, limit)
    return None


def grew_alike(history: History, back: int) -> bool:
    """Whether the loss and the gradient norm of every layer grew by about the same factor at the record `back` from the
    end, compared with their medians before it: so they do where the scale of the loss changes.
    """
    n = BASELINE_RECORDS + back
    losses, norms = history.scalar("loss", n), history.window("grad_norm", n)
    if not np.isfinite(losses[-back]):
        return False
    own = is_own(history, n)[:-back]
    numbers = np.column_stack([losses, norms[:, history.layout.layers]])
    numbers = numbers[:, np.isfinite(numbers[-back])]
    before = numbers[:-back][own]
    before = before[np.isfinite(before).all(axis=1)]
    if len(before) < BASELINE_RECORDS // 2 or numbers.shape[1] < 3:
        return False
    usual = np.median(before, axis=0)
    if not (usual > 0).all() or numbers[-back, 0] < COMMON_RATIO * usual[0]:
        return False
    beside = numbers[-back] / usual / (numbers[-back, 0] / usual[0])
    return bool((beside <= COMMON_RATIO).all() and (beside >= 1 / COMMON_RATIO).all())


def largest_update(history: History, back: int) -> float:
    """The largest update of a layer over the size of its weights at that record; NaN where it is not known."""
    ratios = history.row("update_ratio", back=back)[history.layout.layers]
    return float(np.fmax.reduce(ratios, initial=np.nan))


def last_jump(
    history: History, *, rate: int, gradient: int, of: int = 1, records: int = EFFECT_RECORDS
) -> RateJump | GradientJump | None:
    """The jump of the rate up to the record `rate` from the end, as in `rate_jump`; or else that of the gradient up to
    the record `gradient` from the end.
    """
    return rate_jump(history, back=rate, of=of, records=records) or gradient_jump(history, back=gradient, of=of)


def began_text(history: History, onset: int) -> str:
    """' It is so from the first step on.', or what else is known of the time before the record `onset` from the end."""
    if is_first_record(history, onset):
        return " It is so from the first step on."
    known = (own_records(history) > onset).any()
    return " It was not so before." if known else " It is so for as long as the record goes back."


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is known of how a fault began."""

    began: str
    """' It was not so before.', or the like."""
    sentence: str
    """' At step 30, the learning rate jumped 30 times, to 3.', empty where nothing came just before."""
    headline: str
    """When or by what, as the end of a clause: ' since the first step', ': the learning rate jumped 30 times, to 3';
    empty where neither is known."""
    remedy: str
    """What would have prevented it; empty where nothing came just before."""


def beginning(history: History, onset: int) -> Beginning:
    """How a fault began that is there since the record `onset` from the end: of what came before, the `EFFECT_RECORDS`
    records that are nearest count.
    """
    began, own = began_text(history, onset), own_records(history)
    jump = last_jump(history, rate=onset + 1, gradient=onset + 1)
    if isinstance(jump, GradientJump) and np.count_nonzero((own > onset) & (own < jump.back)) >= EFFECT_RECORDS:
        jump = None
    if jump is None:
        return Beginning(began, "", " since the first step" if is_first_record(history, onset) else "", "")
    # clipping was there, and did not help
    clipped = isinstance(jump, GradientJump) and jump.limit is not None
    remedy = "a smaller lr in configure_optimizers." if clipped else jump.remedy
    when = "By" if isinstance(jump, RateJump) and jump.after_gap else "At"
    return Beginning(began, f" {when} step {history.steps[-jump.back]}, {jump.text}.", f": {jump.text}", remedy)
