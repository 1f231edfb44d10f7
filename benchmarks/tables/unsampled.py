"""A step at which nothing is measured, in a model so narrow that the step hides nothing."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.paired import bootstrap, median
from benchmarks.peers import CONTROL, GRADWATCH_IDLE
from benchmarks.rows import MICROSECONDS, Row, Table
from benchmarks.steps import compare, self_time
from benchmarks.workloads import WORKLOADS, mlp


def table(quick: bool) -> Table:
    narrow = replace(WORKLOADS["mlp"], build=lambda: mlp(8), batch=lambda: (torch.randn(1, 8), torch.randint(10, (1,))))
    turns = compare(narrow, (CONTROL, GRADWATCH_IDLE), rounds=5 if quick else 8, cycles=10, steps=9)
    idle, control = turns[GRADWATCH_IDLE.name], turns[CONTROL.name]
    where = "mlp, width 8"
    return Table(
        "unsampled",
        "A step that is not measured",
        [
            Row("self time", where, bootstrap(median, self_time(GRADWATCH_IDLE, idle)), MICROSECONDS, 15e-6),
            Row("end of the step alone", where, bootstrap(median, idle.extra("end")), MICROSECONDS),
            Row("whole step", where, bootstrap(median, idle.extra("step")), MICROSECONDS),
            Row("A/A control, whole step", where, bootstrap(median, control.extra("step")), MICROSECONDS),
            Row("bare step", where, bootstrap(median, idle.bare()), MICROSECONDS),
        ],
    )
