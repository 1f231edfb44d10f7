"""The first step at which any number of two runs differs, whatever the noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Floats
from gradwatch.runs.compare.aligned import LOWEST, NOT_LOGARITHMS, AlignedRuns

ROUNDING_SHARE = 1e-5
"""Share by which a norm may differ and be the same: GradWatch's own precision (docs/performance.md), as the way a norm
is measured depends on the machine's load."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first one."""

    step: int
    statistic: str
    layers: tuple[int, ...]
    """Places of those that differ, of those compared; empty for what is `NOT_LOGARITHMS`."""
    same: int
    """How many do not, of those that were measured then and could: see `constant`."""
    before: int | None
    """The last step at which the gradients were compared and the same."""
    constant: int
    """How many do not because they begin with constants, as those of normalisations do, whatever the seed."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Where the learning rates part."""

    step: int
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Whether two runs are one."""

    steps: int
    """Records of gradients that both have."""
    identical: bool
    """Every number that both have is the same, to the last bit that is kept."""
    first: Difference | None
    """None where they differ by rounding at most."""
    rates: Rates | None
    """None where they are the same as far as is known."""


def first_difference(pair: AlignedRuns) -> FirstDifference:
    """`pair`: with gradient norms."""
    shared = {name: pair.shared(name) for name in pair.sides if name != "update_ratio"}
    identical = all(np.array_equal(x, y, equal_nan=True) for _, x, y in shared.values())
    of_gradients, *_ = shared["grad_norm"]
    steps = len(of_gradients)
    found = [
        (int(when[row[0]]), order, name)
        for order, (name, (when, x, y)) in enumerate(shared.items())
        if len(row := np.flatnonzero(_differs(name, x, y).any(axis=1)))
    ]
    if not found:
        return FirstDifference(steps, identical, None, None)
    step, _, name = min(found)
    when, x, y = shared[name]
    here = when == step
    apart = _differs(name, x, y)[here].any(axis=0)
    alike = ~apart & ~np.isnan(x[here] + y[here]).all(axis=0)  # a layer of another optimizer is not measured here
    earlier = of_gradients[of_gradients < step]
    layers = () if name in NOT_LOGARITHMS else tuple(int(place) for place in np.flatnonzero(apart))
    before = int(earlier[-1]) if len(earlier) else None
    fixed = np.zeros_like(apart)
    if name == "weight_norm" and before is None:
        fixed = alike & _constant(x[here][0], pair.modules)
    first = Difference(step, name, layers, int(np.count_nonzero(alike & ~fixed)), before, int(fixed.sum()))
    return FirstDifference(steps, identical, first, _rates(*shared["lr"]) if "lr" in shared else None)


def _rates(when: NDArray[np.int64], x: Floats, y: Floats) -> Rates | None:
    rows = np.flatnonzero(_differs("lr", x, y).any(axis=1))
    return Rates(int(when[rows[0]]), float(x[rows[0], 0]), float(y[rows[0], 0])) if len(rows) else None


def _constant(logs: Floats, modules: tuple[str, ...]) -> NDArray[np.bool_]:
    """Which layers begin with constants, going by log10 of their weight norms: normalisations, zeros, and those that
    share their norm with another layer, as no two do that are drawn at random.
    """
    names = np.array(["Norm" in module for module in modules], dtype=bool)
    order = np.argsort(logs)
    near = np.diff(logs[order]) <= np.log10(1 + np.finfo(np.float32).eps)
    shared = np.zeros(len(logs), dtype=bool)
    shared[order[1:]] |= near
    shared[order[:-1]] |= near
    constant: NDArray[np.bool_] = names | (logs <= LOWEST) | shared
    return constant


def _differs(name: str, x: Floats, y: Floats) -> NDArray[np.bool_]:
    """Where two numbers are not the same but for rounding; logarithms but for the loss."""
    there = ~(np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        if name in NOT_LOGARITHMS:
            apart = np.abs(x - y) > ROUNDING_SHARE * np.minimum(np.abs(x), np.abs(y))  # inf differs from 1
        else:
            apart = np.abs(x - y) > np.log10(1 + ROUNDING_SHARE)
    different: NDArray[np.bool_] = there & (apart | (np.isnan(x) != np.isnan(y)))
    if name != "loss":  # a number that one run did not measure is no difference
        different &= ~np.isnan(x) & ~np.isnan(y)
    return different
