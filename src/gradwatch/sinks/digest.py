"""Every layer's gradient norm over a whole run, in memory that does not grow with the run."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

from gradwatch.record import Floats

SLOTS = 128
"""Stretches of time that a run is kept in: more than a line on a terminal has characters. Judgement."""

Logs = NDArray[np.float32]


class Digest:
    """Minimum, maximum and one sampled number per stretch of time and row; full, it joins the stretches in pairs.

    Kept as log10 in float32: -inf is a norm of zero, +inf one that is not finite, NaN one that was not measured.
    About 1.6 kB a row.
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

    def __len__(self) -> int:
        return len(self._last)

    def add(self, norms: Floats, measured: NDArray[np.bool_]) -> None:
        """One record: `norms` and `measured` have shape [rows]."""
        usual = len(norms) > 0 and norms.min() > 0 and norms.max() < np.inf and bool(measured.all())
        with nullcontext() if usual else np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log10(norms).astype(np.float32)
        if not usual:
            logs[~np.isfinite(norms)] = np.inf
            logs[~measured] = np.nan
            self._had_nan |= measured & np.isnan(norms)
        row = self._slot
        np.fmin(self._low[row], logs, out=self._low[row])
        np.fmax(self._high[row], logs, out=self._high[row])
        # one moment of each stretch, drawn at random, or the nearest at which the row was measured
        wanted = measured if self._filled <= self._pick else measured & np.isnan(self._sample[row])
        np.copyto(self._sample[row], logs, where=wanted)
        np.copyto(self._last, norms, where=measured)
        self._seen |= measured
        self._filled += 1
        if self._filled == self._stride:
            self._advance()

    def grow(self, rows: int) -> None:
        """Make room for rows that appeared later, up to `rows` in all."""
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
        return self._seen

    @property
    def last(self) -> Floats:
        return self._last

    @property
    def minimum(self) -> Floats:
        return self._norms(np.fmin.reduce(self._low, axis=0))

    @property
    def maximum(self) -> Floats:
        return self._norms(np.fmax.reduce(self._high, axis=0))

    @property
    def median(self) -> Floats:
        """The lower median of the finite norms, or what the others are where there is none; beyond `SLOTS` records,
        that of a sample spread evenly over the run.
        """
        finite = np.where(np.isposinf(self._sample), np.nan, self._sample)
        count = np.count_nonzero(~np.isnan(finite), axis=0)
        ordered = np.sort(finite, axis=0)  # NaN goes last
        middle = np.take_along_axis(ordered, (np.maximum(count - 1, 0) // 2)[None], axis=0)[0]
        return self._norms(np.where(count > 0, middle, np.fmax.reduce(self._sample, axis=0)))

    @property
    def low(self) -> Logs:
        """Lowest log10 norm of each stretch so far: shape [stretches, rows]; a view, do not write."""
        return self._low[: self._slot + (self._filled > 0)]

    @property
    def high(self) -> Logs:
        """Highest log10 norm of each stretch so far: shape [stretches, rows]; a view, do not write."""
        return self._high[: self._slot + (self._filled > 0)]

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
