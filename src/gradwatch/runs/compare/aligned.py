"""The layers that two runs have in common, and their numbers as logarithms, in the same order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import MEASURED, Floats
from gradwatch.runs.arrays import RunArrays, StatisticSeries

COMPARED = ("weight_norm", "grad_norm", "update_ratio")
"""Statistics that are compared, causes first: a step's weights come before its gradients, and those before its update.
Signals and activations follow from these. Judgement."""

NOT_LOGARITHMS = ("loss", "lr")
"""Numbers of the whole step, which are no logarithms and have one column."""

LOWEST, HIGHEST = -46.0, 39.0
"""log10 of what stands for zero and for what is not finite: just beyond what float32 can hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One statistic of one run."""

    keys: NDArray[np.int64]
    """The optimizer step of each record, and which optimizer, as one number. Shape [k], ascending."""
    steps: NDArray[np.int64]
    logs: Floats
    """log10, of what is `NOT_LOGARITHMS` the numbers; NaN where it was not measured: shape [k, layers]."""


@dataclass(frozen=True, slots=True, eq=False)
class AlignedRuns:
    """The common layers of two runs."""

    layers: tuple[str, ...]
    """In the first run's order."""
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Those that one of them has."""
    modules: tuple[str, ...]
    """Class name of each layer, in the first run."""
    sides: dict[str, tuple[Side, Side]]
    """By statistic or number of the whole step, where both have it."""

    def shared(self, name: str) -> tuple[NDArray[np.int64], Floats, Floats]:
        """The steps of the records that both runs have of one of `sides`, and the numbers of each run there."""
        a, b = self.sides[name]
        _, mine, other = np.intersect1d(a.keys, b.keys, return_indices=True)
        return a.steps[mine], a.logs[mine], b.logs[other]


def align(a: RunArrays, b: RunArrays) -> AlignedRuns:
    names = [[run.layout.sites[place].name for place in run.layout.layers] for run in (a, b)]
    both = set(names[0]) & set(names[1])
    common = [name for name in names[0] if name in both]
    only = tuple(tuple(name for name in mine if name not in both) for mine in names)
    sides = {
        name: (_side(a, name, common), _side(b, name, common))
        for name in COMPARED
        if name in a.values and name in b.values
    }
    sides |= {
        name: (_side_of_steps(a, name), _side_of_steps(b, name))
        for name in NOT_LOGARITHMS
        if name in a.scalars and name in b.scalars
    }
    modules = tuple(a.layout.sites[a.layout.index[name]].module for name in common)
    return AlignedRuns(tuple(common), (only[0], only[1]), modules, sides)


def _side(run: RunArrays, statistic: str, layers: list[str]) -> Side:
    series = run.values[statistic]
    places = [run.layout.index[name] for name in layers]
    numbers = series.numbers[:, places].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.clip(np.log10(numbers), LOWEST, HIGHEST)
    logs[np.isposinf(numbers)] = HIGHEST
    if statistic == "grad_norm":  # here a NaN may be what was measured
        measured = run.codes[:, places] == MEASURED
        logs[measured & np.isnan(numbers)] = HIGHEST
    return _sorted(series, logs)


def _side_of_steps(run: RunArrays, name: str) -> Side:
    return _sorted(run.values["grad_norm"], run.scalars[name][:, None])


def _sorted(series: StatisticSeries, numbers: Floats) -> Side:
    """`numbers` at the records of `series`."""
    keys = series.steps * 256 + series.optimizers
    order = np.argsort(keys, kind="stable")
    return Side(keys[order], series.steps[order], numbers[order])
