"""The level of the loss at the start of a run and at its end, and which steps stand for it, and for the rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Mask

LEVEL_LOSSES = 10
"""Losses whose median is a level. Judgement: single batches differ."""

OUTLIER_RATIO = 100.0
"""Ratio of the highest of the first losses to the first one and to their median from which the loss blew up. Measured:
of ten squared errors of one distribution 0.1 % have it, of ten means of two or more none."""

JUDGED_STEPS = 50
"""Steps before which nothing is said of the loss: it need not have moved by then. Judgement."""

LOWER_LOSS_SHARE = 0.02
"""Share of its first level by which a loss has to fall to count as lower. Judgement: the noise of a level of ten losses
is about that where nothing is learnt."""

ABSENT_STEPS = 32
"""Steps in a row without an optimizer, from which on another has replaced it. Judgement: a critic takes fewer between
two of its generator."""


class LeadingOptimizer:
    """Chooses the steps of one optimizer at a time, because each may have a loss and a rate of its own: those of the
    first one, and where that has not stepped lately, of the first that has.
    """

    def __init__(self) -> None:
        self._recent = np.zeros(ABSENT_STEPS - 1, dtype=np.int64)

    def rows(self, optimizers: NDArray[np.int64]) -> Mask:
        """Which of the next steps are its, by the number of each one's optimizer: shape [k]."""
        numbers = np.concatenate([self._recent, optimizers])
        self._recent = numbers[len(optimizers) :]
        if not numbers.any():
            return np.ones(len(optimizers), dtype=np.bool_)
        leading = sliding_window_view(numbers, ABSENT_STEPS).min(axis=1) if len(optimizers) else optimizers
        return np.asarray(optimizers == leading)


def known_numbers(name: str, numbers: Mapping[str, Floats], steps: int) -> tuple[Floats, Mask]:
    """One of the `numbers` of whole steps, NaN where there is none, and at which steps it was measured, also as NaN."""
    nowhere = np.full(steps, np.nan)
    values = numbers.get(name, nowhere)
    return values, ~np.isnan(values) | (numbers.get(f"{name}_nan", nowhere) == 1)


def ends_of(numbers: NDArray[Any]) -> tuple[float, float, float] | None:
    """The first, the highest and the last, of learning rates; None without any."""
    return (float(numbers[0]), float(numbers.max()), float(numbers[-1])) if len(numbers) else None


class LossLevels:
    """Collects the losses of a run, of several optimizers those of the `LeadingOptimizer`."""

    def __init__(self) -> None:
        self._leading = LeadingOptimizer()
        self._first: list[float] = []
        self._last: list[float] = []
        self._steps = 0
        self._several = self._ended_nonfinite = False

    def add(self, numbers: Mapping[str, Floats], optimizers: NDArray[np.int64]) -> None:
        """`numbers`: of whole steps, by name, as a block has them: shape [k]; `optimizers`: of each."""
        own = self._leading.rows(optimizers)
        self._several |= not own.all()
        losses, measured = known_numbers("loss", numbers, len(optimizers))
        known = losses[own & measured]
        if not len(known):
            return
        self._ended_nonfinite = not np.isfinite(known[-1])
        finite = known[np.isfinite(known)].tolist()
        self._steps += len(finite)
        self._first += finite[: LEVEL_LOSSES - len(self._first)]
        self._last = [*self._last, *finite][-LEVEL_LOSSES:]

    @property
    def levels(self) -> tuple[float, float] | None:
        """The first and the last level; None where they are not known, or it is too early to tell."""
        return None if self._several or self._steps < JUDGED_STEPS else self._medians()

    def shown(self, judged: tuple[float, float] | None) -> tuple[float, float] | None:
        """The levels of a run of any length, None without a loss; the last is NaN where the latest loss is not finite.
        `judged`: those of its verdict, which may know steps that are not here.
        """
        first, last = judged or self._medians() or (np.nan, np.nan)
        if self._ended_nonfinite:
            return first, np.nan
        return None if np.isnan(first) else (first, last)

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "last": self._last, "steps": self._steps, "several": self._several}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises LookupError, TypeError or ValueError for a state that `state_dict` did not make."""
        first, last = ([float(loss) for loss in state[key]] for key in ("first", "last"))
        self._first, self._last = first[:LEVEL_LOSSES], last[-LEVEL_LOSSES:]
        self._steps, self._several = int(state["steps"]), bool(state["several"])

    def _medians(self) -> tuple[float, float] | None:
        """Of a fifth of the losses, at most of `LEVEL_LOSSES`, so that those of a short run differ. The first loss is
        the first level where it is lower, and one of those after it is far above both.
        """
        if not self._first:
            return None
        count = max(1, min(LEVEL_LOSSES, self._steps // 5))
        first, last = float(np.median(self._first[:count])), float(np.median(self._last[-count:]))
        if self._first[0] < first and max(self._first) >= OUTLIER_RATIO * max(abs(self._first[0]), first):
            first = self._first[0]
        return first, last


def loss_text(levels: tuple[float, float]) -> str:
    """The loss at first and at last: 'loss 231 -> 40'."""
    first, last = levels
    return f"loss {number_text(first, 3)} -> {number_text(last, 3)}"


def stuck_text(levels: tuple[float, float]) -> str:
    """What the loss did, for a sentence: 'loss 231 -> 231: it has not moved'; empty where it fell."""
    first, last = levels
    size = max(abs(first), abs(last))
    if last < first - LOWER_LOSS_SHARE * abs(first):
        return ""
    if last > first + LOWER_LOSS_SHARE * size:
        return f"{loss_text(levels)}: it is higher than at the start"
    hardly = "not" if number_text(first, 3) == number_text(last, 3) else "hardly"
    return f"{loss_text(levels)}: it has {hardly} moved"
