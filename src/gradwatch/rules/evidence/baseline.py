"""Baselines over time: the total gradient norm and the loss at the start of the history, and now."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import OPENING, History
from gradwatch.core.loss_levels import LOWER_LOSS_SHARE
from gradwatch.core.median import NORMAL_MAD, median
from gradwatch.core.record import Floats
from gradwatch.rules.evidence.records import is_alone, is_own, own_losses

LEVEL_RECORDS = 5
"""Records whose median is the level of a loss or a gradient. Judgement."""

LEARNT_SHARE = 0.1
"""Share of its first level by which a loss has fallen where something was learnt. Judgement."""

STUCK_RECORDS = 150
"""Records after which a loss that has not moved is stuck. Judgement: warm-up takes a hundred in small trainings."""

FIRST_FALL_SHARE = 0.05
"""Share of its first level within which it has stayed. Judgement: the biases of a head learn how frequent classes are,
which takes a hundredth or three off a cross entropy, and a tenth of these records."""

STEADY_SHARE = 0.05
"""Share of its level up to which a loss that is stuck varies, as a standard deviation. Measured: where nothing is
learnt a cross entropy of batches of 32 has 0.01; one near its floor, or of a policy, has 0.2 and more."""


def median_and_spread(numbers: Floats) -> tuple[Floats, Floats]:
    """Median and robust standard deviation over axis 0, NaN left out."""
    middle = median(numbers)
    return middle, NORMAL_MAD * median(np.abs(numbers - middle))


def is_stuck(history: History) -> bool | None:
    """Whether the loss is where it began, and has been there throughout: of one optimizer, for `STUCK_RECORDS`. None
    where it has been there for as long as the record goes back, and its start is forgotten: it may have been learnt.
    """
    losses = history.scalar("loss", len(history))
    if len(losses) < STUCK_RECORDS or not is_alone(history) or not np.isfinite(losses).all():
        return False
    tenths = np.array([np.median(part) for part in np.array_split(losses, 10)])
    first, late = float(np.median(losses[: STUCK_RECORDS // 10])), losses[-STUCK_RECORDS // 2 :]
    _, spread = median_and_spread(late)
    stays = (np.abs(tenths[1:] - tenths[1]) <= LOWER_LOSS_SHARE * abs(first)).all()
    near = (np.abs(tenths - first) <= FIRST_FALL_SHARE * abs(first)).all()
    if not (stays and near and spread <= STEADY_SHARE * abs(first)):
        return False
    return True if history.whole else None


def per_full_accumulation(history: History, n: int) -> Floats:
    """The gradient norms of the last `n` records: shape [records, sites].

    Records of an incomplete accumulation, of n of N micro-batches, are multiplied by N / n.
    """
    norms = history.window("grad_norm", n)
    ratio = history.scalar("accumulate", n) / history.scalar("accumulated", n)
    short = np.isfinite(ratio) & (ratio > 1)
    return norms * np.where(short, ratio, 1.0)[:, None] if short.any() else norms


def first_and_last(history: History, series: Floats, first: int, last: int) -> tuple[Floats, Floats] | None:
    """The first `first` and the newest `last` of `series`, a number of each record, that are of the latest record's
    optimizer; None while there are too few. The first ones are finite; the newest may not be.
    """
    own, early = is_own(history, len(history)), _first(history, series, first)
    late = series[-OPENING:][own[-OPENING:]][-last:]
    return (early, late) if len(early) == first and np.count_nonzero(own) >= first + last else None


def _first(history: History, series: Floats, count: int) -> Floats:
    """The first `count` finite numbers of `series` that are of the latest record's optimizer; fewer where the opening
    has fewer.
    """
    early = series[:OPENING]
    return early[is_own(history, len(history))[:OPENING] & np.isfinite(early)][:count]


def largest_first_loss(history: History, records: int) -> float:
    """The largest loss by magnitude of the first `records` of this optimizer; infinite where none is known."""
    early = _first(history, history.scalar("loss", len(history)), records)
    return float(early[np.abs(early).argmax()]) if len(early) else float("inf")


def first_and_last_loss(history: History, records: int) -> tuple[float, float] | None:
    """The loss at the start and now, each the median of `records` losses; None where it is unknown."""
    levels = first_and_last(history, history.scalar("loss", len(history)), records, records)
    return None if levels is None else (float(np.median(levels[0])), float(np.median(levels[1])))


def first_steps_text(history: History, records: int) -> str:
    """'its first 10 steps'; where the history has forgotten these, 'the 10 steps from step 230 on'."""
    first, early = history.steps[0], min(OPENING, len(history))
    steps = f"{records} {'measured ' * history.has_gaps(early, back=len(history) - early + 1)}steps"
    return f"its first {steps}" if first == 0 else f"the {steps} from step {first} on"


def at_first_text(history: History) -> str:
    """When the first level was that a history tells of."""
    return "at first" if history.whole else f"from step {history.steps[0]} on"


def was_learnt(history: History, *, back: int = 1, of: int = 1) -> bool:
    """Whether the loss of the optimizer of the record `of` had fallen by then, to the record `back` from the end: by a
    tenth of its first level, and by more than it varies.
    """
    own = own_losses(history, len(history), back=back, of=of)
    if len(own) < 2 * LEVEL_RECORDS:
        return False
    early, late = own[:LEVEL_RECORDS], own[-LEVEL_RECORDS:]
    first, last = float(np.median(early)), float(np.median(late))
    return last <= first - LEARNT_SHARE * abs(first) and late.max() < early.min()
