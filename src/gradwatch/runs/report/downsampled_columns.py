"""A statistic of every layer over a whole run, however long, in a fixed number of columns: what a picture needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Floats
from gradwatch.sinks.downsampling import TOGETHER, Logs, kept_of

COLUMNS = 256
"""Columns at most, half of that at least in a long run: finer than a pixel where the report is read on a telephone.
Judgement."""


class Pool:
    """Lowest and highest number per column and row; full, it joins its columns in pairs.

    Kept as `kept_of` has them.
    """

    def __init__(self, columns: int = COLUMNS, *, log: bool = True) -> None:
        """`log`: False keeps the numbers as they are."""
        self._stride, self._first = 1, 0
        self._columns, self._log = columns, log
        self._low: Logs = np.full((columns, 0), np.nan, dtype=np.float32)
        self._high = self._low.copy()
        self._filled = np.zeros(columns, dtype=bool)
        self._used = 0
        self._waiting: list[tuple[int, Floats, NDArray[np.bool_]]] = []

    def __len__(self) -> int:
        self._settle()
        return self._used

    @property
    def stride(self) -> int:
        """How many x's share a column."""
        self._settle()
        return self._stride

    @property
    def first(self) -> int:
        """The first x."""
        self._settle()
        return self._first

    def add(self, axis: int, numbers: Floats, measured: NDArray[np.bool_] | None = None) -> None:
        """What was seen at the x `axis`: `numbers` has shape [rows], of which those `measured` count (None: those that
        are not NaN). They are kept for a while: not to be written.
        """
        if self._waiting and len(self._waiting[0][1]) != len(numbers):
            self._settle()
        self._waiting.append((axis, numbers, ~np.isnan(numbers) if measured is None else measured))
        if len(self._waiting) == TOGETHER:
            self._settle()

    def columns(self, rows: int) -> tuple[Logs, Logs]:
        """Lowest and highest, shape [columns, rows] each; a column in which nothing was taken shows the one before."""
        self._settle()
        used = self._used
        place = np.maximum.accumulate(np.where(self._filled[:used], np.arange(used), 0))
        missing = ((0, 0), (0, rows - self._low.shape[1]))
        low, high = (np.pad(kept[place], missing, constant_values=np.nan) for kept in (self._low, self._high))
        return low, high

    def _settle(self) -> None:
        """Take in what waits."""
        if not self._waiting:
            return
        axes, numbers, measured = (np.array(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting = []
        more = numbers.shape[1] - self._low.shape[1]
        if more > 0:
            self._low, self._high = (
                np.pad(kept, ((0, 0), (0, more)), constant_values=np.nan) for kept in (self._low, self._high)
            )
        if not self._used:
            self._first = int(axes[0])
        after = np.maximum(axes - self._first, 0)
        while after.max() // self._stride >= self._columns:
            self._halve()
        columns = after // self._stride
        starts = np.flatnonzero(np.diff(columns, prepend=-1))
        logs = kept_of(numbers, measured, log=self._log)
        for column, part in zip(columns[starts].tolist(), np.split(logs, starts[1:]), strict=True):
            for kept, join in ((self._low, np.fmin), (self._high, np.fmax)):
                row = kept[column, : logs.shape[1]]
                join(row, join.reduce(part, axis=0), out=row)
        self._filled[columns] = True
        self._used = max(self._used, int(columns.max()) + 1)

    def _halve(self) -> None:
        half = self._columns // 2
        for kept, join in ((self._low, np.fmin), (self._high, np.fmax)):
            kept[:half] = join(kept[0::2], kept[1::2])
            kept[half:] = np.nan
        self._filled[:half] = self._filled[0::2] | self._filled[1::2]
        self._filled[half:] = False
        self._used = -(-self._used // 2)
        self._stride *= 2
