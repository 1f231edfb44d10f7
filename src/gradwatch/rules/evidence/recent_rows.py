"""The last rows of a history, judged together: what several rules ask of them, computed once."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import Floats, Mask

EARLIER_ROWS = 8
"""Rows before them of which it is known what was measured. `Spike` and `Divergence` look back as far."""

ROUNDING = 1 - 1e-9
"""Factor by which a ratio is allowed to be smaller than a limit in decades, which a rule compares as logarithms."""


class RecentRows:
    """The last `count` rows of a history. Where a rule may find something at one of them is asked of all at once."""

    def __init__(self, history: History, count: int) -> None:
        self.history = history.covering(count)
        """With all that `history.until` of any of these rows has."""
        self.count = count
        self.layout = history.layout
        self.nowhere: Mask = np.zeros(count, dtype=bool)
        """None of the rows; not to be changed."""
        length = len(self.history)
        ends = np.arange(length - count, length) + 1
        self.begins = np.maximum(ends - history.capacity, 0)
        """For each row, the first record that its rule sees: shape [rows]."""
        self.lengths = ends - self.begins
        """For each row, the number of records that its rule sees: shape [rows]."""
        self.openings = history.openings(count)
        """For each row, the lowest and the highest total of the run's opening: shape [rows, 2]."""
        self.codes = history.codes(count)
        self.optimizers = history.optimizers(count)
        norms = self.numbers("grad_norm")
        self.totals: Floats = np.full(count, np.nan) if norms is None else norms[:, 0]
        self._measured = self.history.measured(count + EARLIER_ROWS)
        self._ranges: dict[str, tuple[Floats, Floats]] = {}
        self._ages: dict[str, int] = {}

    def fresh(self, statistic: str) -> Mask | None:
        """At which rows `statistic` was measured: shape [rows]; None where at none of them."""
        found = self._measured.get(statistic)
        return None if found is None or not (there := found[-self.count :]).any() else there

    def sampled_before(self, statistic: str, back: int = 1) -> Mask | None:
        """At which rows `statistic` was measured `back` rows before: shape [rows]; None where at none of them."""
        found = self._measured.get(statistic)
        if found is None or not (there := found[: max(0, len(found) - back)][-self.count :]).any():
            return None
        return there if len(there) == self.count else np.pad(there, (self.count - len(there), 0))

    def before(self, statistic: str, back: int = 1) -> Floats:
        """`statistic`, which was measured, `back` rows before each: shape [rows, sites]; NaN where there is none."""
        numbers = self.history.window(statistic, self.count + back)
        assert numbers is not None, "it was measured"
        there = numbers[: len(numbers) - back]
        short = self.count - len(there)
        return np.pad(there, ((short, 0), (0, 0)), constant_values=np.nan) if short else there

    def age(self, statistic: str) -> int:
        """Records since `statistic` was last measured, as of the first of these rows."""
        if statistic not in self._ages:
            self._ages[statistic] = self.history.until(-self.count).age(statistic)
        return self._ages[statistic]

    def numbers(self, statistic: str) -> Floats | None:
        """`statistic` at these rows: shape [rows, sites]; None where it was never measured."""
        return self.history.window(statistic, self.count)

    def scalar(self, name: str) -> Floats | None:
        """A number of the whole step at these rows: shape [rows]; None where it is unknown."""
        return self.history.scalar(name, self.count)

    def range(self, statistic: str) -> tuple[Floats, Floats]:
        """The lowest and the highest number of a layer at each row: shape [rows] each; NaN where there is none."""
        if statistic not in self._ranges:
            numbers = self.numbers(statistic)
            if numbers is None or not len(self.layout.layers):
                nothing = np.full(self.count, np.nan)
                return nothing, nothing
            there = numbers[:, self.layout.layers]
            self._ranges[statistic] = np.fmin.reduce(there, axis=1), np.fmax.reduce(there, axis=1)
        return self._ranges[statistic]

    def apart(self, statistic: str, dex: float, *, zeros: bool) -> Mask:
        """At which rows two layers may differ by `dex` or more, zeros left aside or not: shape [rows]."""
        lowest, highest = self.range(statistic)
        if not zeros and (lowest == 0).any():
            numbers = self.numbers(statistic)
            assert numbers is not None, "it has a range"
            there = numbers[:, self.layout.layers]
            lowest = np.fmin.reduce(np.where(there > 0, there, np.nan), axis=1)
        return np.asarray((highest > 0) & (highest * 10.0**-dex >= lowest * ROUNDING))
