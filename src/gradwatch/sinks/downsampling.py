"""A statistic of every site over a run of any length, downsampled to a bounded number of columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.median import lower_median
from gradwatch.core.record import Floats, Mask, Sites

MAX_COLUMNS = 256
"""Columns at most, and in a long run at least half of that: more than a terminal has characters, and than the report
has pixels on a phone. Judgement."""

BATCHED_STEPS = 256
"""Steps that are processed together: a few at a time take five times as long (measured)."""

Logs = NDArray[np.float32]


class _Columns(NamedTuple):
    """The numbers of columns, shape [columns, sites] each."""

    low: Logs
    high: Logs
    sample: Logs
    priority: NDArray[np.uint32]
    """Priority of the sample; 0 where there is none."""

    def select(self, columns: slice | Sites) -> _Columns:
        return _Columns._make(numbers[columns] for numbers in self)

    def concatenated(self, other: _Columns, *, axis: int) -> _Columns:
        """Both, concatenated along `axis`: 0 for columns, 1 for sites."""
        return _Columns._make(np.concatenate(both, axis) for both in zip(self, other, strict=True))

    def merged(self, other: _Columns) -> _Columns:
        """Each column merged with the column of `other` at the same index."""
        return _Columns(
            np.fmin(self.low, other.low),
            np.fmax(self.high, other.high),
            np.where(other.priority > self.priority, other.sample, self.sample),
            np.maximum(self.priority, other.priority),
        )


class Downsampling:
    """Lowest, highest and one sampled number for each column and site. When all columns are used, they merge in pairs.

    A column is an interval of the x-axis. Magnitudes are stored as log10 in float32: -inf for zero, +inf for non-finite
    numbers, NaN where not measured. Lowest and highest are exact up to that rounding; the sample is the number of the
    step with the highest `_priorities`. The result does not depend on how the steps were cut into blocks.
    """

    def __init__(self, sites: int = 0, *, columns: int = MAX_COLUMNS, log: bool = True) -> None:
        """`log`: False stores the numbers themselves, which may have any sign."""
        self._first = self._last_x = 0
        self._stride = 1
        self._log = log
        self._columns = _empty_columns(1, sites)
        """As many as are in use, of `_max_columns`: there may be many sites, and nothing measured."""
        self._filled = np.zeros(1, dtype=np.bool_)
        self._max_columns = columns
        self._used = self._steps = 0
        self._last: Floats = np.full(sites, np.nan)
        self._minimum, self._maximum = self._last.copy(), self._last.copy()
        self._waiting: list[tuple[NDArray[np.int64], Floats, Mask]] = []
        self._rows = 0
        """Rows in `_waiting`."""

    def extend(self, axis: NDArray[np.int64], numbers: Floats, measured: Mask | None = None) -> None:
        """Add steps at `axis`, shape [k], with `numbers`, shape [k, sites], of which the `measured` ones count (None:
        those that are not NaN). The arrays are held for some time: do not write to them.
        """
        self._waiting.append((axis, numbers, ~np.isnan(numbers) if measured is None else measured))
        self._rows += len(axis)
        if self._rows >= BATCHED_STEPS:
            self._process_waiting()

    def grow(self, sites: int) -> None:
        """Add sites, up to `sites` in all."""
        self._process_waiting()
        more = sites - len(self._last)
        self._columns = self._columns.concatenated(_empty_columns(len(self._filled), more), axis=1)
        self._last, self._minimum, self._maximum = (
            np.pad(known, (0, more), constant_values=np.nan) for known in (self._last, self._minimum, self._maximum)
        )

    def __len__(self) -> int:
        """Number of columns used."""
        self._process_waiting()
        return self._used

    @property
    def axis(self) -> tuple[int, int]:
        """The first and the last position on the x-axis."""
        self._process_waiting()
        return self._first, self._last_x

    @property
    def stride(self) -> int:
        """Positions of the x-axis in a column; the last column may have fewer."""
        self._process_waiting()
        return self._stride

    def share(self, axis: float) -> float:
        """Where the middle of a position of the x-axis is in a picture of the columns, from 0 (left) to 1."""
        self._process_waiting()
        return min(max((axis - self._first + 0.5) / (self._stride * self._used), 0.0), 1.0)

    def extremes(self) -> tuple[Logs, Logs]:
        """Lowest and highest, shape [columns, sites] each; a column without a step repeats the one before it."""
        self._process_waiting()
        used = self._used
        place = np.maximum.accumulate(np.where(self._filled[:used], np.arange(used), 0))
        return self._columns.low[place], self._columns.high[place]

    @property
    def seen(self) -> Mask:
        """Which sites were ever measured."""
        self._process_waiting()
        lowest: Logs = np.fmin.reduce(self._columns.low, axis=0)
        return ~np.isnan(lowest)

    @property
    def last(self) -> Floats:
        """The number of each site that was measured last."""
        self._process_waiting()
        return self._last

    @property
    def minimum(self) -> Floats:
        """The least of the finite numbers of each site; NaN without any."""
        self._process_waiting()
        return self._minimum

    @property
    def maximum(self) -> Floats:
        """The most of the finite numbers of each site; NaN without any."""
        self._process_waiting()
        return self._maximum

    @property
    def median(self) -> Floats:
        """The lower median of the finite numbers; NaN without any. Over all steps while each column is one step, and
        later over the samples; `median_of` says so.
        """
        self._process_waiting()
        sample = self._columns.sample
        middle = lower_median(np.where(np.isposinf(sample), np.nan, sample)).astype(np.float64)
        with np.errstate(over="ignore"):
            return np.asarray(10.0**middle if self._log else middle)

    @property
    def median_of(self) -> str:
        """Which steps the median is of, as text; empty where it is of all steps."""
        if self.stride > 1:
            return f"of {len(self)} steps, one of every {self.stride:,}"
        shared = self._steps > np.count_nonzero(self._filled)  # a layer has one optimizer, and the total all
        return "that of the total is of one optimizer at each step" if shared else ""

    def _process_waiting(self) -> None:
        """Add the waiting steps to the columns."""
        if not self._waiting:
            return
        axis, numbers, measured = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._rows = [], 0
        if not self._steps:
            self._first = int(axis[0])
        self._last_x = max(self._last_x, int(axis.max()))
        while (self._last_x - self._first) // self._stride >= self._max_columns:
            self._merge_pairs()
        self._allocate((self._last_x - self._first) // self._stride + 1)
        # a position before the latest one is added to the latest column
        places = np.maximum.accumulate(np.maximum((axis - self._first) // self._stride, self._used - 1))
        finite = np.where(measured & np.isfinite(numbers), numbers, np.nan)
        self._minimum = np.fmin(self._minimum, np.fmin.reduce(finite, axis=0))
        self._maximum = np.fmax(self._maximum, np.fmax.reduce(finite, axis=0))
        known = np.where(measured & np.isnan(finite), np.inf, finite)
        priority = measured * _priorities(self._steps, len(axis))[:, None]
        with np.errstate(divide="ignore", over="ignore"):
            kept: Logs = (np.log10(known) if self._log else known).astype(np.float32)
        columns, new = _one_each(places, _Columns(kept, kept, kept, priority))
        for column, now in zip(self._columns, self._columns.select(columns).merged(new), strict=True):
            column[columns] = now
        self._filled[columns] = True
        self._used, self._steps = int(columns[-1]) + 1, self._steps + len(axis)
        latest = len(axis) - 1 - measured[::-1].argmax(axis=0)
        np.copyto(self._last, numbers[latest, np.arange(len(latest))], where=measured.any(axis=0))

    def _allocate(self, columns: int) -> None:
        """Have at least that many columns."""
        allocated = len(self._filled)
        if columns > allocated:
            more = min(self._max_columns, 1 << (columns - 1).bit_length()) - allocated
            self._columns = self._columns.concatenated(_empty_columns(more, len(self._last)), axis=0)
            self._filled = np.pad(self._filled, (0, more))

    def _merge_pairs(self) -> None:
        self._stride *= 2
        if not self._used:
            return
        self._allocate(self._max_columns)
        half = len(self._filled) // 2
        merged = self._columns.select(slice(0, None, 2)).merged(self._columns.select(slice(1, None, 2)))
        self._columns = merged.concatenated(_empty_columns(half, len(self._last)), axis=0)
        self._filled = np.pad(self._filled[0::2] | self._filled[1::2], (0, half))
        self._used = -(-self._used // 2)


def extremes_of(low: Logs, high: Logs, most: int) -> tuple[Logs, Logs, NDArray[np.intp]]:
    """The lowest of `low` and the highest of `high` in at most `most` groups of neighbours along the first axis, which
    is not empty; and where each group begins.
    """
    groups = min(len(high), most)
    begins = np.arange(groups) * len(high) // groups
    return np.fmin.reduceat(low, begins), np.fmax.reduceat(high, begins), begins


def _one_each(places: Sites, rows: _Columns) -> tuple[Sites, _Columns]:
    """`rows` merged into one for each of `places`, which are ascending, and those places."""
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    if len(starts) == len(places):
        return places, rows
    priority = np.maximum.reduceat(rows.priority, starts)
    chosen = rows.priority == np.repeat(priority, np.diff(starts, append=len(places)), axis=0)
    return places[starts], _Columns(
        np.fmin.reduceat(rows.low, starts),
        np.fmax.reduceat(rows.high, starts),
        np.fmax.reduceat(np.where(chosen, rows.sample, np.float32(np.nan)), starts),
        priority,
    )


def _empty_columns(columns: int, sites: int) -> _Columns:
    nothing = np.full((columns, sites), np.nan, dtype=np.float32)
    return _Columns(nothing, nothing.copy(), nothing.copy(), np.zeros((columns, sites), dtype=np.uint32))


def _priorities(first: int, count: int) -> NDArray[np.uint32]:
    """A pseudo-random number above 0 for each of `count` steps from number `first` on, the same in every run (the
    finalizer of SplitMix64: Steele, Lea and Flood 2014).
    """
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed >> np.uint64(32)) | np.uint64(1)).astype(np.uint32)
