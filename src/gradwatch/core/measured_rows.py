"""The numbers of one statistic in a history: rows only for the records at which it was measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Floats

FIRST_ROOM = 8
"""Rows for which room is made at first: as many samples as a short run has of a statistic. Judgement."""


class MeasuredRows:
    """A row of shape [sites] for each record at which a statistic was measured; records are known by their numbers.

    A statistic that is sampled at one of fifty records takes a fiftieth of the memory.
    """

    def __init__(self, sites: int, *, forgotten: int = 0) -> None:
        """`forgotten`: the number of the last record whose row was dropped."""
        self._forgotten = forgotten
        self._numbers = np.empty(0, dtype=np.int64)  # ascending
        self._rows: Floats = np.empty((0, sites))
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with the room for more rows."""
        return self._numbers.nbytes + self._rows.nbytes

    def extend(self, numbers: NDArray[np.int64], rows: Floats, *, most: int) -> None:
        """Add rows of later records: shapes [k] and [k, sites]; `most`: the number of rows that it ever has."""
        end, room = self._end + len(numbers), len(self._numbers)
        if end > room:
            added = max(min(max(FIRST_ROOM, 2 * room), most), end) - room
            self._numbers = np.concatenate([self._numbers, np.zeros(added, dtype=np.int64)])
            self._rows = np.concatenate([self._rows, np.empty((added, self._rows.shape[1]))])
        self._numbers[self._end : end], self._rows[self._end : end] = numbers, rows
        self._end = end

    def replace_last(self, number: int, row: Floats) -> bool:
        """Set the row of record `number`; False where that is not the latest row."""
        if not self._end or self._numbers[self._end - 1] != number:
            return False
        self._rows[self._end - 1] = row
        return True

    def forget(self, before: int) -> None:
        """Drop the rows of records with numbers below `before`."""
        first = int(self._numbers[: self._end].searchsorted(before))
        if first:
            self._forgotten = int(self._numbers[first - 1])
        kept = self._end - first
        self._numbers[:kept], self._rows[:kept] = self._numbers[first : self._end], self._rows[first : self._end]
        self._end = kept

    def widen(self, added: int) -> None:
        """Add sites, at which nothing was measured."""
        self._rows = np.pad(self._rows, ((0, 0), (0, added)), constant_values=np.nan)

    def latest(self, last: int) -> int:
        """The number of the latest record up to number `last` that has a row, or had one; 0 without one."""
        end = int(self._numbers[: self._end].searchsorted(last, "right"))
        return int(self._numbers[end - 1]) if end else self._forgotten

    def between(self, first: int, last: int) -> tuple[NDArray[np.int64], Floats]:
        """Those of the records number `first` to `last` that have rows: their numbers, and their rows, shape
        [rows, sites]; read-only views.
        """
        start, end = self._numbers[: self._end].searchsorted((first, last + 1))
        return self._numbers[start:end], self._rows[start:end]

    def at(self, numbers: NDArray[np.int64], *, known: int) -> Floats:
        """One row for each of the records `numbers`, NaN where nothing was measured, and beyond record number `known`:
        shape [records, sites].
        """
        there = self._numbers[: self._end]
        if not self._end:
            return np.full((len(numbers), self._rows.shape[1]), np.nan)
        places = np.minimum(there.searchsorted(numbers), self._end - 1)
        rows = self._rows[places]
        rows[(there[places] != numbers) | (numbers > known)] = np.nan
        return rows

    def window(self, first: int, last: int, *, known: int, sites: int | slice) -> Floats:
        """One row for each record number `first` to `last`, NaN where nothing was measured, and beyond record number
        `known`: shape [records, sites], or [records] of a single site, not to be changed.
        """
        records = last + 1 - first
        start, end = self._numbers[: self._end].searchsorted((first, min(last, known) + 1))
        measured = self._rows[start:end, sites]
        if end - start == records:
            return measured
        shape = (records, *measured.shape[1:])
        if start == end:
            return np.broadcast_to(np.nan, shape)
        rows = np.full(shape, np.nan)
        rows[self._numbers[start:end] - first] = measured
        return rows
