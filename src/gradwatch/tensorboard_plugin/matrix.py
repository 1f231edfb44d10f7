"""One statistic of a run as a matrix, steps by names: pooled, cut to a window, or summarised.

Each place has a state: a code of `gradwatch.core.record.Missing`, or one of those below. Steps that are not there,
because TensorBoard kept others or an event was damaged, are one column, `LOST` for every name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.median import lower_median
from gradwatch.core.record import MEASURED, NOT_SAMPLED, OTHER_OPTIMIZER, Missing

LOST, NO_NUMBER, NOT_A_NUMBER, INFINITE = 98, 99, 100, 101
"""States of a place without a finite number: of steps that are not there; of a statistic that says no reason; of a
number that was measured and is not finite."""

HELD_STATES = (NO_NUMBER, NOT_SAMPLED, OTHER_OPTIMIZER)
"""States at which the page repeats the number before."""

HELD_COLUMNS = 4096
"""Columns over which a number is repeated, at most. Judgement."""

FEWEST_USUAL = 5
"""Numbers before an alert of which the median is what is usual, at least. Judgement."""

Steps = NDArray[np.int64]
Numbers = NDArray[np.float32]
States = NDArray[np.uint8]

_REASONS = [code for code in map(int, Missing) if code not in (MEASURED, *HELD_STATES)]
_BY_RANK = np.array([*HELD_STATES, LOST, *_REASONS, MEASURED, NOT_A_NUMBER, INFINITE], dtype=np.uint8)
"""The state of several places together is the last of theirs in this order."""

_RANKS = np.zeros(256, dtype=np.uint8)
_RANKS[_BY_RANK] = np.arange(len(_BY_RANK))


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

    @property
    def nbytes(self) -> int:
        return self.low.nbytes + self.states.nbytes


def matrix_of(names: tuple[str, ...], steps: Steps, numbers: Numbers, states: States) -> Matrix:
    """A matrix of rows, [rows, names], by step. Of rows at one step those count that measured a place, and of those
    the last. A row that is `LOST` stands for the steps up to the next one.
    """
    columns, place = np.unique(steps, return_inverse=True)
    if len(columns) < len(steps):
        order = np.argsort(place, kind="stable")
        among = np.arange(len(steps)) - np.searchsorted(place[order], place[order])  # which of those at its step it is
        joined = np.full((len(columns), len(names)), np.nan, dtype=np.float32)
        kept = np.full(joined.shape, NO_NUMBER, dtype=np.uint8)
        for number in range(int(among.max()) + 1):
            rows = order[among == number]
            at = place[rows]
            better = _RANKS[states[rows]] >= _RANKS[kept[at]]
            joined[at] = np.where(better, numbers[rows], joined[at])
            kept[at] = np.where(better, states[rows], kept[at])
        numbers, states = joined, kept
    else:
        order = np.argsort(steps)
        numbers, states = numbers[order], states[order]
    last = np.where(_lost(states), np.append(columns[1:] - 1, columns[-1:]), columns)
    return Matrix(names, columns, last, count_records(states), numbers, numbers, states)


def count_records(states: States) -> int:
    """How many columns of a matrix that is not pooled there are, but for those of lost steps."""
    return int(np.count_nonzero(~_lost(states)))


def states_of(numbers: Numbers, codes: NDArray[np.int8] | None = None) -> States:
    """State of each number. `codes`: why there is none; None for a statistic that says no reason."""
    states: States = np.full(numbers.shape, NO_NUMBER, dtype=np.uint8)
    if codes is not None:
        states = codes.astype(np.uint8)
        states[(states == MEASURED) & np.isnan(numbers)] = NOT_A_NUMBER
    states[np.isfinite(numbers)] = MEASURED
    states[np.isinf(numbers)] = INFINITE
    return states


def window(matrix: Matrix, first: int | None, last: int | None) -> Matrix:
    """The columns with steps from `first` to `last`; None is no limit."""
    begin = 0 if first is None else int(np.searchsorted(matrix.last, first, side="left"))
    end = len(matrix.first) if last is None else int(np.searchsorted(matrix.first, last, side="right"))
    part = slice(begin, max(begin, end))
    return Matrix(
        matrix.names,
        matrix.first[part],
        matrix.last[part],
        count_records(matrix.states[part]),
        matrix.low[part],
        matrix.high[part],
        matrix.states[part],
    )


def pooled(matrix: Matrix, columns: int) -> Matrix:
    """`matrix` in at most `columns` columns, which keep their extremes and whatever was not finite. Lost steps are a
    column where they take the room of one or more.
    """
    steps = len(matrix.first)
    if steps <= columns:
        return matrix
    begins = _begins(matrix, columns)
    ends = np.append(begins[1:], steps) - 1
    return Matrix(
        matrix.names,
        matrix.first[begins],
        matrix.last[ends],
        matrix.records,
        np.fmin.reduceat(matrix.low, begins, axis=0),
        np.fmax.reduceat(matrix.high, begins, axis=0),
        _BY_RANK[np.maximum.reduceat(_RANKS[matrix.states], begins, axis=0)],
    )


def _begins(matrix: Matrix, columns: int) -> NDArray[np.intp]:
    """Where each of the pooled columns begins."""
    steps, lengths = len(matrix.first), matrix.last - matrix.first + 1
    lost = np.flatnonzero(_lost(matrix.states) & (lengths > (matrix.last[-1] - matrix.first[0] + 1) / columns))
    lost = lost[np.argsort(-lengths[lost], kind="stable")][: columns // 4]
    even = max(1, columns - 2 * len(lost))
    begins = np.union1d(np.arange(even) * steps // even, np.append(lost, lost + 1))
    return begins[begins < steps].astype(np.intp)


def fewer_names(matrix: Matrix, most: int, first: Sequence[int]) -> Matrix:
    """`matrix` with at most `most` names, evenly spread: of neighbours the one whose place comes earliest in `first`,
    else the one in the middle.
    """
    names = len(matrix.names)
    if names <= most:
        return matrix
    ends = np.arange(most + 1) * names // most
    places = (ends[:-1] + ends[1:]) // 2
    for place in reversed(first):
        places[np.searchsorted(ends, place, side="right") - 1] = place
    return of_names(matrix, places.tolist())


def of_names(matrix: Matrix, places: list[int]) -> Matrix:
    """Some of the names, in this order."""
    names = tuple(matrix.names[place] for place in places)
    low, high, states = matrix.low[:, places], matrix.high[:, places], matrix.states[:, places]
    return Matrix(names, matrix.first, matrix.last, matrix.records, low, high, states)


def latest(matrix: Matrix, step: int) -> tuple[Numbers, States, Steps]:
    """Each name's last number at or before `step`, its state there, and the step it is of: shape [names] each; where
    there is none, the state of the last step before.
    """
    place = int(np.searchsorted(matrix.first, step, side="right")) - 1
    if place < 0:
        nothing = np.full(len(matrix.names), np.nan, dtype=np.float32)
        return nothing, np.full(nothing.shape, NO_NUMBER, dtype=np.uint8), np.zeros(nothing.shape, dtype=np.int64)
    begin = max(0, place + 1 - HELD_COLUMNS)
    states = matrix.states[begin : place + 1]
    held = np.isin(states, HELD_STATES)
    back = np.where(held.all(axis=0), 0, np.argmax(~held[::-1], axis=0))
    at, each = place - back, np.arange(len(matrix.names))
    return matrix.low[at, each], matrix.states[at, each], matrix.first[at]


def summarised(matrix: Matrix, onsets: Mapping[int, int] | None = None) -> dict[str, NDArray[np.float32] | States]:
    """Per name, over all steps of a matrix that is not pooled: `median` (the lower one), `min`, `max`, `last`.

    `usual` is as `usual_of` has it. `state` is that of the last number; where there never was one, of the last step.
    """
    each = np.arange(len(matrix.names))
    measured = (matrix.states == MEASURED) | (matrix.states > NO_NUMBER)
    final = np.where(measured.any(axis=0), len(measured) - 1 - np.argmax(measured[::-1], axis=0), len(measured) - 1)
    return {
        "median": lower_median(matrix.low),
        "usual": usual_of(matrix, onsets or {}),
        "min": np.fmin.reduce(matrix.low),
        "max": np.fmax.reduce(matrix.low),
        "last": matrix.low[final, each],
        "state": matrix.states[final, each],
    }


def usual_of(matrix: Matrix, onsets: Mapping[int, int]) -> Numbers:
    """What each name's number is usually, the lower median of those other than 0; 0 where all are: shape [names].

    Of the places in `onsets` it is that of the steps before, where they have a few numbers: a fault is not what is
    usual.
    """
    usual = _usual(matrix.low)
    for place, onset in onsets.items():
        before = matrix.low[: np.searchsorted(matrix.last, onset), place]
        if np.count_nonzero(~np.isnan(before)) >= FEWEST_USUAL:
            usual[place] = _usual(before)
    return usual


def _usual(numbers: Numbers) -> Numbers:
    """The lower median over axis 0 of those other than 0; 0 where all are."""
    zeros = numbers == 0
    usual = lower_median(np.where(zeros, np.float32(np.nan), numbers))
    return np.where(np.isnan(usual) & zeros.any(axis=0), np.float32(0), usual)


def _lost(states: States) -> NDArray[np.bool_]:
    """The columns of steps that are not there."""
    lost: NDArray[np.bool_] = (states == LOST).all(axis=1)
    return lost
