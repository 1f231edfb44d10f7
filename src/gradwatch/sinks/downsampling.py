"""Every layer's gradient norm over a whole run, in memory that does not grow with the run."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Floats

SLOTS = 128
"""Stretches of time that a run is kept in: more than a line on a terminal has characters. Judgement."""

TOGETHER = 32
"""Records that are taken in together: one by one, each takes three times as long (measured)."""

Logs = NDArray[np.float32]


class Downsampling:
    """Minimum, maximum and one sampled number per stretch of time and row; full, it joins the stretches in pairs.

    Kept as `kept_of` has them. About 1.6 kB a row.
    """

    def __init__(self, rows: int) -> None:
        self._low: Logs = np.full((SLOTS, rows), np.nan, dtype=np.float32)
        self._high, self._sample = self._low.copy(), self._low.copy()
        self._last: Floats = np.full(rows, np.nan)
        self._seen = np.zeros(rows, dtype=bool)
        self._had_nan = np.zeros(rows, dtype=bool)
        self._slot = self._filled = self._pick = 0
        self._stride = 1
        self._random = random.Random(0)
        self._waiting: list[tuple[Floats, NDArray[np.bool_]]] = []

    def __len__(self) -> int:
        return len(self._last)

    def add(self, norms: Floats, measured: NDArray[np.bool_]) -> None:
        """One record: `norms` and `measured` have shape [rows]. They are kept for a while: not to be written."""
        self._waiting.append((norms, measured))
        if len(self._waiting) == TOGETHER:
            self._settle()

    def grow(self, rows: int) -> None:
        """Make room for rows that appeared later, up to `rows` in all."""
        self._settle()
        more = rows - len(self)
        pad = ((0, 0), (0, more))
        self._low, self._high, self._sample = (
            np.pad(kept, pad, constant_values=np.nan) for kept in (self._low, self._high, self._sample)
        )
        self._last = np.pad(self._last, (0, more), constant_values=np.nan)
        self._seen, self._had_nan = (np.pad(flags, (0, more)) for flags in (self._seen, self._had_nan))

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Which rows were ever measured."""
        self._settle()
        return self._seen

    @property
    def last(self) -> Floats:
        self._settle()
        return self._last

    @property
    def minimum(self) -> Floats:
        self._settle()
        return self._norms(np.fmin.reduce(self._low, axis=0))

    @property
    def maximum(self) -> Floats:
        self._settle()
        return self._norms(np.fmax.reduce(self._high, axis=0))

    @property
    def median(self) -> Floats:
        """The lower median of the finite norms, or what the others are where there is none; beyond `SLOTS` records,
        that of a sample spread evenly over the run.
        """
        self._settle()
        finite = np.where(np.isposinf(self._sample), np.nan, self._sample)
        count = np.count_nonzero(~np.isnan(finite), axis=0)
        ordered = np.sort(finite, axis=0)  # NaN goes last
        middle = np.take_along_axis(ordered, (np.maximum(count - 1, 0) // 2)[None], axis=0)[0]
        return self._norms(np.where(count > 0, middle, np.fmax.reduce(self._sample, axis=0)))

    @property
    def low(self) -> Logs:
        """Lowest log10 norm of each stretch so far: shape [stretches, rows]; a view, do not write."""
        self._settle()
        return self._low[: self._slot + (self._filled > 0)]

    @property
    def high(self) -> Logs:
        """Highest log10 norm of each stretch so far: shape [stretches, rows]; a view, do not write."""
        self._settle()
        return self._high[: self._slot + (self._filled > 0)]

    def _settle(self) -> None:
        """Take in what waits."""
        if not self._waiting:
            return
        norms, measured = (np.array(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting = []
        seen, latest = measured.any(axis=0), len(norms) - 1 - measured[::-1].argmax(axis=0)
        np.copyto(self._last, norms[latest, np.arange(len(self))], where=seen)
        self._seen |= seen
        self._had_nan |= (measured & np.isnan(norms)).any(axis=0)
        logs = kept_of(norms, measured)
        while len(logs):
            room = self._stride - self._filled
            self._take(logs[:room])
            logs = logs[room:]

    def _take(self, logs: Logs) -> None:
        """Shape [records, rows], no more than there is room for in the present stretch."""
        slot, before = self._slot, max(0, self._pick + 1 - self._filled)
        np.fmin(self._low[slot], np.fmin.reduce(logs, axis=0), out=self._low[slot])
        np.fmax(self._high[slot], np.fmax.reduce(logs, axis=0), out=self._high[slot])
        # one moment of each stretch, drawn at random, or the nearest at which the row was measured
        self._sample[slot] = _first_known([*logs[:before][::-1], self._sample[slot], *logs[before:]])
        self._filled += len(logs)
        if self._filled == self._stride:
            self._advance()

    def _norms(self, logs: Logs) -> Floats:
        norms = 10.0 ** logs.astype(np.float64)
        return np.where(np.isposinf(norms) & self._had_nan, np.nan, norms)

    def _advance(self) -> None:
        self._slot += 1
        self._filled = 0
        if self._slot == SLOTS:
            self._halve()
        self._pick = self._random.randrange(self._stride)

    def _halve(self) -> None:
        half = SLOTS // 2
        first = np.array([self._random.random() < 0.5 for _ in range(half)])[:, None]
        early, late = self._sample[0::2], self._sample[1::2]
        chosen, other = np.where(first, early, late), np.where(first, late, early)
        self._sample[:half] = np.where(np.isnan(chosen), other, chosen)
        self._low[:half] = np.fmin(self._low[0::2], self._low[1::2])
        self._high[:half] = np.fmax(self._high[0::2], self._high[1::2])
        for kept in (self._low, self._high, self._sample):
            kept[half:] = np.nan
        self._slot = half
        self._stride *= 2


def kept_of(numbers: Floats, measured: NDArray[np.bool_], *, log: bool = True) -> Logs:
    """Of a magnitude its log10, or with `log=False` the number itself, in float32; -inf is the logarithm of zero, +inf
    stands for what is not finite, NaN for what was not measured.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = (np.log10(np.abs(numbers)) if log else numbers).astype(np.float32)
    kept[~np.isfinite(numbers)] = np.inf
    kept[~measured] = np.nan
    return kept


def _first_known(rows: Iterable[Logs]) -> Logs:
    """Of each column the first number of `rows`, one at least, that is not NaN."""
    first, *others = rows
    known = first.copy()
    for other in others:
        missing = np.isnan(known)
        if not missing.any():
            break
        known[missing] = other[missing]
    return known
