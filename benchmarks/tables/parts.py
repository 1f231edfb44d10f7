"""Tables of single parts: the rules over a large model, start-up, the accuracy of norms."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from time import process_time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.paired import Floats, bootstrap, median
from benchmarks.peers import NORMS_ONLY
from benchmarks.rows import ERROR, MILLISECONDS, Row, Table, exactly
from benchmarks.steps import collected
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from gradwatch.core.block import Block
    from gradwatch.core.record import Layout


RULES_TARGET = 1e-3
"""Seconds a step: on the host, beside whatever the device does. Judgement."""

BLOCK = 64
"""Steps that are judged together."""


def rules_table(quick: bool) -> Table:
    """The default rules over a model of a thousand layers, by block: without a sample and with one."""
    from gradwatch.core.record import Run
    from gradwatch.engine.diagnosis import Diagnosis
    from gradwatch.measure.layers import find_layers, layout_of
    from gradwatch.rules import default_rules

    diagnosis = Diagnosis(default_rules(), (), on_alert=lambda alert: None)
    diagnosis.open(Run(layout_of(find_layers(WORKLOADS["residual"].model())), ""))
    history, spread = diagnosis.history, np.random.default_rng(0)
    rows, blocks, begun = [], 4 if quick else 12, 0
    for what, records in (("recent", 64), ("full", history.capacity)):
        while begun < records:
            diagnosis.judge(healthy_block(history.layout, begun, spread, sampled=begun == 0))
            begun += BLOCK
        for sampled in (False, True):
            taken = []
            for _ in range(blocks):
                block = healthy_block(history.layout, begun, spread, sampled=sampled)
                begun += BLOCK
                with collected():
                    start = process_time()
                    diagnosis.judge(block)
                    taken.append((process_time() - start) / BLOCK)
            where = f"{what} history, a step of a block {'with a sample' if sampled else 'without one'}"
            rows.append(Row("all default rules", where, bootstrap(median, np.array(taken)), MILLISECONDS, RULES_TARGET))
    assert not diagnosis.incidents.alerts, f"a healthy history, and yet: {diagnosis.incidents.alerts}"
    return Table("rules", f"Rules over {len(history.layout.layers):,} layers", rows)


def healthy_block(layout: Layout, begin: int, spread: np.random.Generator, *, sampled: bool) -> Block:
    """Healthy records from the step `begin` on; `sampled`: with everything that a sampled step has at the first."""
    from gradwatch.core.block import Block
    from gradwatch.core.record import Missing

    shape = (BLOCK, len(layout))

    def about(value: float) -> Floats:
        return value * np.exp(0.1 * spread.standard_normal(shape))

    steps = np.arange(begin, begin + BLOCK)
    always = {"grad_norm": about(1e-2), "grad_norm_clipped": about(1e-2)}
    measured = dict.fromkeys(always, np.full(BLOCK, True))
    first: dict[str, Floats] = {}
    if sampled:
        usual = {"weight_norm": 5.0, "update_ratio": 1e-3, "signal_norm": 1e-2, "signal_rms": 1e-4, "output_rms": 1.0}
        first = {statistic: about(value) for statistic, value in {**usual, "output_max": 4.0}.items()}
        first |= {"zero_fraction": np.zeros(shape), "run_order": np.full(shape, np.nan)}
        first["run_order"][:, layout.layers] = np.arange(len(layout.layers))
        for numbers in first.values():
            numbers[1:] = np.nan
        measured |= dict.fromkeys(first, steps == begin)
    scalars = {"loss": 2.0 * 0.999**steps, "lr": np.full(BLOCK, 1e-3)}
    codes = np.full(shape, int(Missing.MEASURED), dtype=np.int8)
    return Block(layout, steps, steps, np.zeros(BLOCK, dtype=np.int64), always | first, scalars, codes, measured)


IMPORT = """
from time import process_time
begun = process_time()
import gradwatch
print(process_time() - begun)
"""


def start_table(quick: bool) -> Table:
    """What it takes before the first step: the import, and the hooks of a thousand layers."""
    times = 5 if quick else 15
    attach_seconds("mlp")  # what is imported on first use is no part of attaching
    imports = np.array([import_seconds() for _ in range(times)])
    attach = np.array([attach_seconds("residual") for _ in range(times)])
    return Table(
        "start",
        "Start-up",
        [
            Row("import gradwatch", "fresh interpreter", bootstrap(median, imports), MILLISECONDS, 20e-3),
            Row("Watch(model) and attach", "residual, 1,000 layers", bootstrap(median, attach), MILLISECONDS, 50e-3),
        ],
    )


def import_seconds() -> float:
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)


def attach_seconds(name: str) -> float:
    """Default options; nothing written."""
    from gradwatch import Watch

    model = WORKLOADS[name].model()
    with collected():
        begun = process_time()
        with Watch(model, sinks=()):
            return process_time() - begun


ACCURACY_SIZES = (10_000, 262_144, 1_000_000, 4_194_304, 16_000_000, 64_000_000)

EDGES = (1e-25, 1e18)
"""Values whose squares float32 cannot hold."""

TOLERANCE = 1e-4


def accuracy_table(quick: bool) -> Table:
    """How far a norm is from the same in float64."""
    torch.manual_seed(0)
    sizes = [n for n in ACCURACY_SIZES if n <= (16_000_000 if quick else 64_000_000)]
    # equal values are the hard case for a float32 sum: all its roundings go the same way
    equal = [*((n, 0.1) for n in sizes), *((1_000_000, value) for value in EDGES)]
    gradients = [(f"{n:,} normal", partial(torch.randn, n)) for n in sizes]
    gradients += [(f"{n:,} x {value:g}", partial(torch.full, (n,), value)) for n, value in equal]
    return Table("accuracy", "Norms against float64", [accuracy_row(where, make()) for where, make in gradients])


def accuracy_row(where: str, gradient: Tensor) -> Row:
    return Row("relative error", where, exactly(relative_error(gradient)), ERROR, TOLERANCE)


def relative_error(gradient: Tensor) -> float:
    truth = float64_norm(gradient)
    return abs(watched_norm(gradient) - truth) / truth


def float64_norm(gradient: Tensor) -> float:
    """The reference."""
    return float(gradient.double().square().sum().sqrt())


def watched_norm(gradient: Tensor) -> float:
    """The norm that a `Watch` reports when `gradient` is the gradient."""
    from gradwatch import Watch

    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Watch(model, **NORMS_ONLY) as watch:
        (model.weight * gradient).sum().backward()
        watch.step(optimizer)
        optimizer.step()
    return float(watch.history.series("grad_norm", "weight")[-1])
