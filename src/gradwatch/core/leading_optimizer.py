"""Which steps stand for the loss and the learning rate of a run with several optimizers."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gradwatch.core.record import Mask

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
