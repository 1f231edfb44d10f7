"""A statistic of every layer over a whole run, however long, in a fixed number of columns: what a picture needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.record import Floats

COLUMNS = 256
"""Columns at most, half of that at least in a long run: finer than a pixel where the report is read on a telephone.
Judgement."""

Logs = NDArray[np.float32]


class Pool:
    """Lowest and highest number per column and row; full, it joins its columns in pairs.

    Kept as log10 in float32: -inf is zero, +inf what is not finite, NaN what was not measured.
    """

    def __init__(self, columns: int = COLUMNS, *, log: bool = True) -> None:
        """`log`: False keeps the numbers as they are."""
        self.stride = 1
        """x's in a column."""
        self.first = 0
        """The first x."""
        self._columns, self._log = columns, log
        self._low: Logs = np.full((columns, 0), np.nan, dtype=np.float32)
        self._high = self._low.copy()
        self._filled = np.zeros(columns, dtype=bool)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def add(self, axis: int, numbers: Floats, measured: NDArray[np.bool_] | None = None) -> None:
        """What was seen at the x `axis`: `numbers` has shape [rows], of which those `measured` count (None: those that
        are not NaN).
        """
        if len(numbers) > self._low.shape[1]:
            pad = ((0, 0), (0, len(numbers) - self._low.shape[1]))
            self._low, self._high = (np.pad(kept, pad, constant_values=np.nan) for kept in (self._low, self._high))
        if not self._used:
            self.first = axis
        column = max(0, axis - self.first) // self.stride
        while column >= self._columns:
            self._halve()
            column = max(0, axis - self.first) // self.stride
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = (np.log10(np.abs(numbers)) if self._log else numbers).astype(np.float32)
        if measured is None:
            measured = ~np.isnan(numbers)
        logs[~np.isfinite(numbers)] = np.inf
        logs[~measured] = np.nan
        for kept, join in ((self._low, np.fmin), (self._high, np.fmax)):
            row = kept[column, : len(logs)]
            join(row, logs, out=row)
        self._filled[column] = True
        self._used = max(self._used, column + 1)

    def columns(self, rows: int) -> tuple[Logs, Logs]:
        """Lowest and highest, shape [columns, rows] each; a column in which nothing was taken shows the one before."""
        used = self._used
        place = np.maximum.accumulate(np.where(self._filled[:used], np.arange(used), 0))
        missing = ((0, 0), (0, rows - self._low.shape[1]))
        low, high = (np.pad(kept[place], missing, constant_values=np.nan) for kept in (self._low, self._high))
        return low, high

    def _halve(self) -> None:
        half = self._columns // 2
        for kept, join in ((self._low, np.fmin), (self._high, np.fmax)):
            kept[:half] = join(kept[0::2], kept[1::2])
            kept[half:] = np.nan
        self._filled[:half] = self._filled[0::2] | self._filled[1::2]
        self._filled[half:] = False
        self._used = -(-self._used // 2)
        self.stride *= 2
