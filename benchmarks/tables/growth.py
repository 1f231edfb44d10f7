"""How the cost grows with the number of layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.paired import Floats, bootstrap, median
from benchmarks.peers import GRADWATCH
from benchmarks.rows import MICROSECONDS, RATIO, Row, Table
from benchmarks.steps import compare, self_time
from benchmarks.workloads import WORKLOADS, deep

LAYERS = (10, 30, 100, 300, 1000, 3000, 10_000)

FITTED_FROM = 100
"""Layers under which the fixed cost of a step shows. Judgement."""

EXPONENT = 1.1
"""Upper bound of `e` in time ~ layers^e. The target says linear; a tenth is for noise. Judgement."""


def table(quick: bool) -> Table:
    layers = [n for n in LAYERS if n <= (1000 if quick else 10_000)]
    times = {n: self_times(n) for n in layers}
    rows = [per_layer(n, times[n]) for n in layers]
    fitted = [n for n in layers if n >= FITTED_FROM]

    def exponent(*columns: Floats) -> Floats:
        heights = np.log([np.atleast_1d(median(column)) for column in columns])
        return np.squeeze(np.polyfit(np.log(fitted), heights, 1)[0])

    slope = bootstrap(exponent, *(times[n] for n in fitted))
    rows.append(Row("e in time ~ layers^e", f"{fitted[0]:,} .. {fitted[-1]:,}", slope, RATIO, EXPONENT))
    return Table("growth", "Growth with the number of layers", rows)


def per_layer(layers: int, times: Floats) -> Row:
    where = f"{layers:,} x Linear(32)"
    return Row("self time per layer", where, bootstrap(lambda column: median(column) / layers, times), MICROSECONDS)


def self_times(layers: int) -> Floats:
    workload = replace(WORKLOADS["deep"], build=partial(deep, layers))
    turns = compare(workload, (GRADWATCH,), rounds=1, cycles=5, steps=2 if layers >= 1000 else 9)
    return self_time(GRADWATCH, turns[GRADWATCH.name])
