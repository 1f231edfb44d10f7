"""One statistic of a run as a matrix, steps by names: joined from its time series, pooled to a screen, summed up.

Each place has a state: a code of `gradwatch.core.record.Missing`, `NO_NUMBER`, `NOT_A_NUMBER` or `INFINITE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Missing

NO_NUMBER, NOT_A_NUMBER, INFINITE = 99, 100, 101
"""States of a place without a finite number: a statistic that says no reason; a measured one that is not finite."""

MEASURED = int(Missing.MEASURED)

Steps = NDArray[np.int64]
Numbers = NDArray[np.float32]
States = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class TagSeries:
    """What one tag holds: the records of one optimizer while the model's layers stayed the same."""

    names: tuple[str, ...]
    steps: Steps
    values: Numbers
    """[steps, names]"""
    codes: NDArray[np.int8] | None = None
    """[steps, names], why there is no number; None for a statistic that says no reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Numbers that are not finite are NaN in `low` and `high`, and `states` says what they were."""

    names: tuple[str, ...]
    first: Steps
    """[columns], the first step of each."""
    last: Steps
    records: int
    """How many steps are in it, pooled or not."""
    low: Numbers
    """[columns, names], least number of each column."""
    high: Numbers
    states: States


def fill_forward(steps: Steps, at: Steps, codes: NDArray[np.int8]) -> NDArray[np.int8]:
    """`codes` [at, names], written when they changed, for each of `steps`; `NOT_SAMPLED` before the first."""
    place = np.searchsorted(at, steps, side="right") - 1
    found = codes[np.maximum(place, 0)]
    found[place < 0] = Missing.NOT_SAMPLED
    return found


def join_series(parts: Sequence[TagSeries], names: Sequence[str]) -> Matrix:
    """One matrix of all `parts`, a column a step. Where two have a place, the one that measured it counts.

    `names` are those of the run, in order; a part's are among them.
    """
    column_of = {name: column for column, name in enumerate(names)}
    steps = np.unique(np.concatenate([part.steps for part in parts])).astype(np.int64)
    values = np.full((len(steps), len(names)), np.nan, dtype=np.float32)
    states = np.full(values.shape, NO_NUMBER, dtype=np.uint8)
    for part in parts:
        columns = np.array([column_of[name] for name in part.names], dtype=np.intp)
        place = np.ix_(np.searchsorted(steps, part.steps), columns)
        found = _states(part)
        better = _order(found) >= _order(states[place])
        values[place] = np.where(better, part.values, values[place])
        states[place] = np.where(better, found, states[place])
    values[~np.isfinite(values)] = np.nan
    return Matrix(tuple(names), steps, steps, len(steps), values, values, states)


def window(matrix: Matrix, first: int | None, last: int | None) -> Matrix:
    """The columns with steps from `first` to `last`; None is no limit."""
    begin = 0 if first is None else int(np.searchsorted(matrix.last, first, side="left"))
    end = len(matrix.first) if last is None else int(np.searchsorted(matrix.first, last, side="right"))
    part = slice(begin, max(begin, end))
    return Matrix(
        matrix.names,
        matrix.first[part],
        matrix.last[part],
        len(matrix.first[part]),
        matrix.low[part],
        matrix.high[part],
        matrix.states[part],
    )


def pooled(matrix: Matrix, columns: int) -> Matrix:
    """`matrix` in at most `columns` columns, which keep their extremes and whatever was not finite."""
    steps = len(matrix.first)
    if steps <= columns:
        return matrix
    begins = np.arange(columns) * steps // columns
    ends = np.append(begins[1:], steps) - 1
    order = np.maximum.reduceat(_order(matrix.states), begins, axis=0)
    return Matrix(
        matrix.names,
        matrix.first[begins],
        matrix.last[ends],
        matrix.records,
        np.fmin.reduceat(matrix.low, begins, axis=0),
        np.fmax.reduceat(matrix.high, begins, axis=0),
        _from_order(order),
    )


def summary(matrix: Matrix) -> dict[str, NDArray[np.float32] | States]:
    """Per name, over all steps of a matrix that is not pooled: `median` (the lower one), `min`, `max`, `last`.

    `state` is that of the last number; where there never was one, of the last step.
    """
    ordered = np.sort(matrix.low, axis=0)  # NaN goes last
    count = np.count_nonzero(~np.isnan(ordered), axis=0)
    each = np.arange(len(matrix.names))
    measured = (matrix.states == MEASURED) | (matrix.states > NO_NUMBER)
    latest = np.where(measured.any(axis=0), len(measured) - 1 - np.argmax(measured[::-1], axis=0), len(measured) - 1)
    return {
        "median": ordered[np.maximum(count - 1, 0) // 2, each],
        "min": ordered[0, each],
        "max": ordered[np.maximum(count - 1, 0), each],
        "last": matrix.low[latest, each],
        "state": matrix.states[latest, each],
    }


def _states(part: TagSeries) -> States:
    states: States = np.full(part.values.shape, NO_NUMBER, dtype=np.uint8)
    if part.codes is not None:
        states = part.codes.astype(np.uint8)
        states[(states == MEASURED) & np.isnan(part.values)] = NOT_A_NUMBER
    states[np.isfinite(part.values)] = MEASURED
    states[np.isinf(part.values)] = INFINITE
    return states


def _order(states: States) -> States:
    """What a column shows of several: not finite before measured, measured before a reason, a reason before none."""
    order = np.where(states == NO_NUMBER, 0, states)
    return np.where(states == MEASURED, NO_NUMBER, order).astype(np.uint8)


def _from_order(order: States) -> States:
    states = np.where(order == 0, NO_NUMBER, order)
    return np.where(order == NO_NUMBER, MEASURED, states).astype(np.uint8)
