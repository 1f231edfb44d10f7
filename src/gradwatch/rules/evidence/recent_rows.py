"""The rows of a block, judged together: what several rules ask of them, computed once."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gradwatch.core.block import AFTER_STEP, Block
from gradwatch.core.history import History
from gradwatch.core.record import Floats, Mask, Sites
from gradwatch.core.statistics import CATALOGUE
from gradwatch.rules.evidence.samples import RECENT_RECORDS

SAMPLED_AFTER_STEP = [name for name in AFTER_STEP if name in CATALOGUE and CATALOGUE[name].sampled]

ROUNDING = 1 - 1e-9
"""Factor by which a ratio is allowed to be smaller than a limit in decades, which a rule compares as logarithms."""


class RecentRows:
    """The rows of a block, the latest of a history. Where a rule may find something is asked of all of them at once."""

    def __init__(self, history: History, block: Block) -> None:
        """`block`: the latest records of `history`."""
        self.count = len(block.steps)
        self.capacity = history.capacity
        self.history = history.covering(self.count)
        """With all that `history.until` of any of these rows has."""
        self.layout = history.layout
        self.block = block
        """The numbers of these rows: it lacks what none of them has."""
        self.nowhere: Mask = np.zeros(self.count, dtype=bool)
        """None of the rows; read-only."""
        self.nowhere.flags.writeable = False
        self._nothing: Floats = np.broadcast_to(np.nan, block.codes.shape)
        self.totals: Floats = self.values("grad_norm")[:, 0]
        self._ranges: dict[str, tuple[Floats, Floats]] = {}

    @cached_property
    def fresh(self) -> dict[str, Mask]:
        """The statistics of which a rule sees a new sample -> at which rows: shape [rows].

        What is measured after a step is seen at the next row.
        """
        found = dict(self.block.measured)
        for name in SAMPLED_AFTER_STEP:
            there = self.history.measured(name, self.count + 1)[:-1]
            found[name] = there if len(there) == self.count else np.append(False, there)
        return {name: there for name, there in found.items() if there.any()}

    def values(self, statistic: str) -> Floats:
        """`statistic` at each row, NaN where it was not measured: shape [rows, sites]."""
        return self.block.values.get(statistic, self._nothing)

    def scalar(self, name: str) -> Floats:
        """A number of the whole step at each row, NaN where there is none: shape [rows]."""
        return self.block.scalars.get(name, self._nothing[:, 0])

    @cached_property
    def newest_signals(self) -> int:
        """The position of the newest sample of signals up to the first of these rows, as `History.newest` at it."""
        return self.history.until(-self.count).newest("signal_norm")

    @cached_property
    def lengths(self) -> Sites:
        """For each row, the number of records that its rule sees: shape [rows]."""
        length = len(self.history)
        return np.minimum(np.arange(length - self.count, length) + 1, self.capacity)

    @cached_property
    def openings(self) -> Floats:
        """For each row, the lowest and the highest total of the run's opening: shape [rows, 2]."""
        return self.history.openings(self.count)

    def range_over_layers(self, statistic: str) -> tuple[Floats, Floats]:
        """The lowest and the highest number of a layer at each row: shape [rows] each; NaN where there is none."""
        if statistic not in self._ranges:
            there = self.values(statistic)[:, self.layout.layers]
            self._ranges[statistic] = (
                np.fmin.reduce(there, axis=1, initial=np.nan),
                np.fmax.reduce(there, axis=1, initial=np.nan),
            )
        return self._ranges[statistic]

    def range_over_samples(self, statistic: str) -> tuple[Floats, Floats]:
        """The lowest and the highest sample of each layer, of all that a rule looks at: shape [layers] each."""
        found = self.history.samples(statistic, RECENT_RECORDS + self.count)[0][:, self.layout.layers]
        return np.fmin.reduce(found, axis=0, initial=np.nan), np.fmax.reduce(found, axis=0, initial=np.nan)

    def apart(self, statistic: str, dex: float, *, zeros: bool) -> Mask:
        """At which rows two layers may differ by `dex` or more, zeros left aside or not: shape [rows]."""
        lowest, highest = self.range_over_layers(statistic)
        if not zeros and (lowest == 0).any():
            there = self.values(statistic)[:, self.layout.layers]
            lowest = np.fmin.reduce(np.where(there > 0, there, np.nan), axis=1)
        return np.asarray((highest > 0) & (highest * 10.0**-dex >= lowest * ROUNDING))
