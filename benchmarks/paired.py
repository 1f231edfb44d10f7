"""Pairing: subjects take turns in one process, each between two turns of the bare one, and only differences count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 2000
INTERVAL = 0.95


class Subject(Protocol):
    """Something that trains, and can be asked for a few steps at a time."""

    def turn(self, steps: int) -> Mapping[str, float]:
        """Train `steps` steps; seconds per step, by part of the step."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and the interval in which 95 of 100 repetitions of the measurement would put it."""

    value: float
    low: float
    high: float


def bootstrap(statistic: Callable[..., Floats], *columns: Floats) -> Estimate:
    """`statistic` of `columns`, each of shape [cycles]; cycles are drawn again with replacement, all columns alike.

    `statistic` takes arrays of shape [..., cycles] and reduces their last axis. Efron 1979, percentile interval.
    """
    cycles = len(columns[0])
    picks = np.random.default_rng(0).integers(cycles, size=(RESAMPLES, cycles))
    spread = statistic(*(column[picks] for column in columns))
    low, high = np.quantile(spread, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return Estimate(float(statistic(*columns)), float(low), float(high))


def median(values: Floats) -> Floats:
    return np.median(values, axis=-1)


def mean(values: Floats) -> Floats:
    return np.mean(values, axis=-1)


def ratio(numerator: Floats, denominator: Floats) -> Estimate:
    """Median over median, both of shape [cycles]: what the usual step costs."""
    return bootstrap(lambda a, b: median(a) / median(b), numerator, denominator)


def ratio_of_means(numerator: Floats, denominator: Floats) -> Estimate:
    """Mean over mean, both of shape [cycles]: where what happens now and then must not be left out."""
    return bootstrap(lambda a, b: mean(a) / mean(b), numerator, denominator)


@dataclass(slots=True)
class Turns:
    """What one subject and its bare neighbours took, seconds per step: one number per cycle and part of the step."""

    taken: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)

    def add(self, before: Mapping[str, float], turn: Mapping[str, float], after: Mapping[str, float]) -> None:
        for part, seconds in turn.items():
            self.taken.setdefault(part, []).append(seconds)
            self.beside.setdefault(part, []).append((before[part] + after[part]) / 2)

    def time(self, part: str = "step") -> Floats:
        return np.array(self.taken[part])

    def bare(self, part: str = "step") -> Floats:
        return np.array(self.beside[part])

    def extra(self, *parts: str) -> Floats:
        """What the subject adds in `parts`: shape [cycles]."""
        return sum((self.time(part) - self.bare(part) for part in parts), np.zeros(1))


def interleave(bare: Subject, subjects: Mapping[str, Subject], *, cycles: int, steps: int) -> dict[str, Turns]:
    """A, B, A, C, A ...: turns of `steps` steps; drift that is slower than two turns cancels."""
    turns = {name: Turns() for name in subjects}
    before = bare.turn(steps)
    for _ in range(cycles):
        for name, subject in subjects.items():
            turn = subject.turn(steps)
            after = bare.turn(steps)
            turns[name].add(before, turn, after)
            before = after
    return turns


def joined(rounds: Sequence[Mapping[str, Turns]]) -> dict[str, Turns]:
    """The cycles of several rounds, each with models built anew: where a model lies in memory is then chance too."""
    whole = {name: Turns() for name in rounds[0]}
    for turns in rounds:
        for name, turn in turns.items():
            for mine, theirs in ((whole[name].taken, turn.taken), (whole[name].beside, turn.beside)):
                for part, seconds in theirs.items():
                    mine.setdefault(part, []).extend(seconds)
    return whole
