"""Where two runs diverge beyond their own noise: pure functions of two series of logarithms, all layers at once.

Both runs are pooled into blocks of `BLOCK_STEPS`, one median each. The distance of a layer in a block is that of its
median to the nearest value of the other run within `SHIFT_SHARE` of that time, so that a run which is a little ahead of
the other does not count as diverged. A layer diverges where the distance is more than `MIN_DECADES` and
`MIN_STANDARD_ERRORS` standard errors of the two medians in `BLOCKS_IN_A_ROW` blocks in a row. The standard error
follows from the median change between consecutive steps of the runs themselves. Sampled statistics, whose steps may
differ between the runs, are interpolated linearly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.median import MEDIAN_ERROR, NORMAL_MAD, median
from gradwatch.core.record import Floats

BLOCK_STEPS = 8
"""Steps of a block, at least: their median averages the noise of single batches. Judgement."""

MAX_BLOCKS = 512
"""Blocks, at most: those of a longer run are longer. Judgement."""

MIN_BLOCKS = 16
"""Blocks of a short run, at least, down to single steps. Judgement."""

SHIFT_SHARE = 0.25
"""Share of the time since the start by which one run may be ahead of the other. Measured: see docs/comparing.md."""

SHIFT_BLOCKS = 2
"""Blocks by which it may be so in any case. Measured, as above."""

MIN_DECADES = 0.3
"""Decades of distance, at least: a factor of two. Measured, as above."""

MIN_STANDARD_ERRORS = 5.0
"""Standard errors of distance, at least. Measured, as above."""

BLOCKS_IN_A_ROW = 2
"""Blocks in a row. Judgement: one may be chance."""

ONSET_SHARE = 0.75
"""Share of the numbers from the onset to the block's end that are out of range, at least. Judgement."""

NOISELESS = ("weight_norm",)
"""Statistics without noise of batches: one block is enough."""


@dataclass(frozen=True, slots=True)
class DivergencePoint:
    """Where one layer diverges."""

    statistic: str
    layer: int
    """Its place among those compared."""
    step: int
    """The first optimizer step at which it has."""
    until: int
    """The last step of the block in which it was found; other layers that diverge within it do so at the same time."""
    values: tuple[float, float]
    """log10 of both runs' medians there, or where each was measured next to it."""
    noise: float
    """Decades by which noise moves their difference: a standard error."""
    excess: float
    """How often as distances apart as it takes."""


def blocks_of(first: int, last: int) -> NDArray[np.int64]:
    """The steps at which blocks begin, and the end of the last."""
    span = max(1, last - first + 1)
    size = max(min(BLOCK_STEPS, span // MIN_BLOCKS), -(-span // MAX_BLOCKS))
    return np.arange(first, last + 1 + size, size, dtype=np.int64)


def divergence_points(
    statistic: str,
    a: tuple[NDArray[np.int64], Floats],
    b: tuple[NDArray[np.int64], Floats],
    edges: NDArray[np.int64],
) -> list[DivergencePoint]:
    """The layers that diverge and when, each once; `a` and `b` are steps [k] and log10 [k, layers]."""
    runs = [_pooled(*run, edges) for run in (a, b)]
    steady = statistic in NOISELESS
    noise = np.sqrt(runs[0].error ** 2 + runs[1].error ** 2) * (not steady)
    courses = [_course(run) for run in runs]
    apart = [distances(runs[i].median, courses[1 - i]) for i in (0, 1)]
    first_moves = np.nan_to_num(np.abs(apart[0]), nan=-1.0) > np.nan_to_num(np.abs(apart[1]), nan=-1.0)
    signed = np.where(first_moves, -apart[0], apart[1])
    """The second run over the first, positive where it is above."""
    limit = np.maximum(MIN_DECADES, MIN_STANDARD_ERRORS * noise)
    with np.errstate(invalid="ignore"):
        beyond = np.abs(signed) > limit
    blocks = 1 if steady else BLOCKS_IN_A_ROW
    found = []
    for layer in range(signed.shape[1]):
        seen = np.flatnonzero(~np.isnan(signed[:, layer]))
        place = _first_of_row(beyond[seen, layer] * np.sign(signed[seen, layer]), blocks)
        if place is None:
            continue
        block = int(seen[place])
        before = int(seen[place - 1]) if place else block
        mover = 0 if first_moves[block, layer] else 1
        sign = np.sign(signed[block, layer])
        # where the block before was not measured, nothing is known of the other's range there
        since = before if before == block - 1 else block
        # at the beginning either may have moved: the later onset is that of the one that did
        onsets = [
            _onset(run, layer, edges, since, block, *_range(other[:, layer], block), way)
            for run, other, way in ((a, courses[1], -sign), (b, courses[0], sign))
        ]
        settled = int(seen[min(place + blocks, len(seen)) - 1])  # the first block may be half before it
        values = [_nearest(run.median[:, layer], settled) for run in runs]
        if np.isnan(runs[mover].median[settled, layer]):
            values[mover] = runs[mover].median[block, layer]
        found.append(
            DivergencePoint(
                statistic,
                layer,
                max((onset for onset in onsets if onset is not None), default=int(edges[block])),
                int(edges[block + 1]) - 1,
                (float(values[0]), float(values[1])),
                float(noise[settled, layer]),
                float(abs(signed[block, layer]) / limit[block, layer]),
            )
        )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Pooled:
    median: Floats
    """[blocks, layers]"""
    error: Floats
    """Its standard error."""
    taken: NDArray[np.bool_]
    """[blocks], whether anything was measured."""


def _pooled(steps: NDArray[np.int64], logs: Floats, edges: NDArray[np.int64]) -> _Pooled:
    blocks, layers = len(edges) - 1, logs.shape[1]
    level = np.full((blocks, layers), np.nan)
    change, count = level.copy(), np.zeros((blocks, layers))
    moves = np.abs(np.diff(logs, axis=0))
    starts = np.searchsorted(steps, edges)
    usual = median(moves) if len(moves) else np.zeros(layers)
    for block in range(blocks):
        rows = slice(starts[block], starts[block + 1])
        if starts[block + 1] > starts[block]:
            level[block] = median(logs[rows])
            count[block] = np.count_nonzero(~np.isnan(logs[rows]), axis=0)
        # with its neighbours: the few steps of a block alone say little of its noise
        wide = moves[max(0, starts[max(0, block - 1)]) : starts[min(blocks, block + 2)]]
        if len(wide):
            change[block] = median(wide)
    sigma = NORMAL_MAD / np.sqrt(2) * np.fmax(np.nan_to_num(change), np.nan_to_num(usual))
    return _Pooled(level, MEDIAN_ERROR * sigma / np.sqrt(np.maximum(1, count)), np.diff(starts) > 0)


def _course(run: _Pooled) -> Floats:
    """The medians, and between two samples of what is only sampled, a straight line from the one to the other."""
    course = run.median.copy()
    taken = np.flatnonzero(run.taken)
    gaps = np.flatnonzero(~run.taken)
    if len(taken) and len(gaps):
        for layer in range(course.shape[1]):
            course[gaps, layer] = np.interp(gaps, taken, run.median[taken, layer], left=np.nan, right=np.nan)
    return course


def _nearest(median: Floats, block: int) -> float:
    """Of one layer, what was measured nearest to a block; NaN where nothing was."""
    there = np.flatnonzero(~np.isnan(median))
    return float(median[there[np.argmin(np.abs(there - block))]]) if len(there) else float("nan")


def distances(mine: Floats, other: Floats) -> Floats:
    """The distance of each block's median of `mine` above the range of `other` around that time, negative below it.

    Shape [blocks, layers], NaN where one of them was not measured.
    """
    out = np.full(mine.shape, np.nan)
    for block in range(len(mine)):
        low, high = _range(other, block)
        value = mine[block]
        out[block] = np.where(value > high, value - high, np.where(value < low, value - low, 0.0))
        out[block, np.isnan(value) | np.isnan(low)] = np.nan
    return out


def _range(median: Floats, block: int) -> tuple[Floats, Floats]:
    reach = SHIFT_BLOCKS + int(SHIFT_SHARE * block)
    window = median[max(0, block - reach) : block + reach + 1]
    return np.fmin.reduce(window, axis=0), np.fmax.reduce(window, axis=0)


def _first_of_row(signs: Floats, length: int) -> int | None:
    """Where the first `length` equal signs in a row begin, none of them 0; the whole of a shorter series counts."""
    length = min(length, len(signs))
    for start in range(len(signs) - length + 1 if length else 0):
        row = signs[start : start + length]
        if row[0] and np.all(row == row[0]):
            return start
    return None


def _onset(
    run: tuple[NDArray[np.int64], Floats],
    layer: int,
    edges: NDArray[np.int64],
    before: int,
    block: int,
    low: Floats,
    high: Floats,
    sign: float,
) -> int | None:
    """The first step of the blocks from `before` to `block` from which on most numbers are out of the other's range;
    None where they are not.
    """
    steps, logs = run
    rows = slice(*np.searchsorted(steps, [edges[before], edges[block + 1]]))
    numbers, when = logs[rows, layer], steps[rows]
    there = ~np.isnan(numbers)
    numbers, when = numbers[there], when[there]
    out = (numbers - high > MIN_DECADES) if sign > 0 else (low - numbers > MIN_DECADES)
    for place in range(len(out)):
        if out[place] and out[place:].mean() >= ONSET_SHARE:
            return int(when[place])
    return None
