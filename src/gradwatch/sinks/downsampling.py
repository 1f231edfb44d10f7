"""A statistic of every site over a whole run, however long, in columns of a fixed number: for pictures and tables."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Floats, Mask, Sites

COLUMNS = 256
"""Columns at most, half of that at least in a long run: more than a line on a terminal has characters, and finer than a
pixel where the report is read on a telephone. Judgement."""

TOGETHER = 256
"""Steps that are taken in together: a few at a time take five times as long (measured)."""

Logs = NDArray[np.float32]


class _Columns(NamedTuple):
    """Shape [columns, sites] each."""

    low: Logs
    high: Logs
    sample: Logs
    priority: NDArray[np.uint32]
    """Of the sample; 0 where there is none."""

    def at(self, columns: slice | Sites) -> _Columns:
        return _Columns(self.low[columns], self.high[columns], self.sample[columns], self.priority[columns])

    def beside(self, other: _Columns, *, axis: int) -> _Columns:
        """Both, one behind the other along `axis`: 0 for columns, 1 for sites."""
        return _Columns(
            np.concatenate([self.low, other.low], axis),
            np.concatenate([self.high, other.high], axis),
            np.concatenate([self.sample, other.sample], axis),
            np.concatenate([self.priority, other.priority], axis),
        )

    def joined(self, other: _Columns) -> _Columns:
        """Each column with the one in its place in `other`."""
        return _Columns(
            np.fmin(self.low, other.low),
            np.fmax(self.high, other.high),
            np.where(other.priority > self.priority, other.sample, self.sample),
            np.maximum(self.priority, other.priority),
        )


class Downsampling:
    """Lowest and highest number of each column and site, and one sampled number; full, it joins its columns in pairs.

    A column is a stretch of the x-axis. Numbers, which are magnitudes, are kept as log10, in float32: -inf is the
    logarithm of zero, +inf stands for what is not finite, NaN for what was not measured. The lowest and highest are
    exact to that; the sample is of the step of the highest `_priorities` at which the site was measured. All
    of it is the same however the steps were cut into blocks.
    """

    def __init__(self, sites: int = 0, *, columns: int = COLUMNS, log: bool = True) -> None:
        """`log`: False keeps the numbers as they are, of any sign."""
        self._first = self._last_x = 0
        self._stride = 1
        self._log = log
        self._columns = _empty(columns, sites)
        self._filled = np.zeros(columns, dtype=np.bool_)
        self._used = self._steps = 0
        self._last: Floats = np.full(sites, np.nan)
        self._had_nan: Mask = np.zeros(sites, dtype=np.bool_)
        self._waiting: list[tuple[NDArray[np.int64], Floats, Mask]] = []
        self._rows = 0
        """In `_waiting`."""

    def extend(self, axis: NDArray[np.int64], numbers: Floats, measured: Mask | None = None) -> None:
        """Steps at the x's `axis`, shape [k], in their order: `numbers` has shape [k, sites], of which those `measured`
        count (None: those that are not NaN). They are kept for a while: not to be written.
        """
        self._waiting.append((axis, numbers, ~np.isnan(numbers) if measured is None else measured))
        self._rows += len(axis)
        if self._rows >= TOGETHER:
            self._settle()

    def grow(self, sites: int) -> None:
        """Make room for sites that appeared later, up to `sites` in all."""
        self._settle()
        more = sites - len(self._last)
        self._columns = self._columns.beside(_empty(len(self._filled), more), axis=1)
        self._last = np.pad(self._last, (0, more), constant_values=np.nan)
        self._had_nan = np.pad(self._had_nan, (0, more))

    def __len__(self) -> int:
        """Columns so far."""
        self._settle()
        return self._used

    @property
    def axis(self) -> tuple[int, int]:
        """The first and the last x."""
        self._settle()
        return self._first, self._last_x

    @property
    def stride(self) -> int:
        """How many x's share a column; the last column may be but partly there."""
        self._settle()
        return self._stride

    def shown(self) -> tuple[Logs, Logs]:
        """Lowest and highest, shape [columns, sites] each; a column without a step shows the one before."""
        self._settle()
        used = self._used
        place = np.maximum.accumulate(np.where(self._filled[:used], np.arange(used), 0))
        return self._columns.low[place], self._columns.high[place]

    @property
    def seen(self) -> Mask:
        """Which sites were ever measured."""
        self._settle()
        lowest: Logs = np.fmin.reduce(self._columns.low, axis=0)
        return ~np.isnan(lowest)

    @property
    def last(self) -> Floats:
        """What was measured last."""
        self._settle()
        return self._last

    @property
    def minimum(self) -> Floats:
        self._settle()
        return self._numbers(np.fmin.reduce(self._columns.low, axis=0))

    @property
    def maximum(self) -> Floats:
        self._settle()
        return self._numbers(np.fmax.reduce(self._columns.high, axis=0))

    @property
    def median(self) -> Floats:
        """The lower median of what is finite, or what the others are where nothing is. It is that of the whole series
        while each column is one step, and later that of the sample; `median_of` says so.
        """
        self._settle()
        sample = self._columns.sample
        finite = np.where(np.isposinf(sample), np.nan, sample)
        count = np.count_nonzero(~np.isnan(finite), axis=0)
        ordered = np.sort(finite, axis=0)  # NaN goes last
        middle = np.take_along_axis(ordered, (np.maximum(count - 1, 0) // 2)[None], axis=0)[0]
        return self._numbers(np.where(count > 0, middle, np.fmax.reduce(sample, axis=0)))

    @property
    def median_of(self) -> str:
        """What the median is of, for people; empty where it is of all steps."""
        return f"of {len(self)} steps, one from each stretch of {self.stride:,}" if self.stride > 1 else ""

    def _settle(self) -> None:
        """Take in what waits."""
        if not self._waiting:
            return
        axis, numbers, measured = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._rows = [], 0
        if not self._steps:
            self._first = int(axis[0])
        self._last_x = max(self._last_x, int(axis.max()))
        while (self._last_x - self._first) // self._stride >= len(self._filled):
            self._halve()
        # an x before the latest belongs to the latest column
        places = np.maximum.accumulate(np.maximum((axis - self._first) // self._stride, self._used - 1))
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        columns = places[starts]
        known = numbers.copy()
        known[~np.isfinite(numbers)] = np.inf
        known[~measured] = np.nan
        priority = measured * _priorities(self._steps, len(axis))[:, None]
        if len(columns) < len(axis):
            new = self._reduced(known, priority, [*starts.tolist(), len(axis)])
        else:
            kept = self._kept(known)
            new = _Columns(kept, kept, kept, priority)
        for column, now in zip(self._columns, self._columns.at(columns).joined(new), strict=True):
            column[columns] = now
        self._filled[columns] = True
        self._used, self._steps = int(columns[-1]) + 1, self._steps + len(axis)
        self._had_nan |= (measured & np.isnan(numbers)).any(axis=0)
        latest = len(axis) - 1 - measured[::-1].argmax(axis=0)
        np.copyto(self._last, numbers[latest, np.arange(len(latest))], where=measured.any(axis=0))

    def _reduced(self, numbers: Floats, priority: NDArray[np.uint32], bounds: list[int]) -> _Columns:
        """A column of the rows between each two of `bounds`."""
        parts = [slice(start, end) for start, end in pairwise(bounds)]
        sites = np.arange(numbers.shape[1])
        chosen = np.array([part.start + priority[part].argmax(axis=0) for part in parts])
        return _Columns(
            # `reduceat` takes ten times as long (measured)
            self._kept(np.array([np.fmin.reduce(numbers[part], axis=0) for part in parts])),
            self._kept(np.array([np.fmax.reduce(numbers[part], axis=0) for part in parts])),
            self._kept(numbers[chosen, sites]),
            priority[chosen, sites],
        )

    def _kept(self, numbers: Floats) -> Logs:
        with np.errstate(divide="ignore", over="ignore"):
            kept: Logs = (np.log10(numbers) if self._log else numbers).astype(np.float32)
        return kept

    def _numbers(self, kept: Logs) -> Floats:
        with np.errstate(over="ignore"):
            numbers = 10.0 ** kept.astype(np.float64) if self._log else kept.astype(np.float64)
        return np.where(np.isposinf(numbers) & self._had_nan, np.nan, numbers)

    def _halve(self) -> None:
        half = len(self._filled) // 2
        joined = self._columns.at(slice(0, None, 2)).joined(self._columns.at(slice(1, None, 2)))
        self._columns = joined.beside(_empty(half, len(self._last)), axis=0)
        self._filled = np.pad(self._filled[0::2] | self._filled[1::2], (0, half))
        self._used = -(-self._used // 2)
        self._stride *= 2


def _empty(columns: int, sites: int) -> _Columns:
    nothing = np.full((columns, sites), np.nan, dtype=np.float32)
    return _Columns(nothing, nothing.copy(), nothing.copy(), np.zeros((columns, sites), dtype=np.uint32))


def _priorities(first: int, count: int) -> NDArray[np.uint32]:
    """A number over 0 for each of `count` steps from number `first` on, as good as random, and the same in every run
    (the finalizer of SplitMix64: Steele, Lea and Flood 2014).
    """
    mixed = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed >> np.uint64(32)) | np.uint64(1)).astype(np.uint32)
