"""The default rules over a model of a thousand layers, at a step between samples and at a sampled one."""

from __future__ import annotations

from time import process_time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.paired import Floats, bootstrap, median
from benchmarks.rows import MILLISECONDS, Row, Table
from benchmarks.steps import collected
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from gradwatch import History

TARGET = 1e-3
"""Seconds a step: on the host, beside whatever the device does. Judgement."""

SAMPLED_EVERY = 25


def table(quick: bool) -> Table:
    from gradwatch.core.history import History
    from gradwatch.measure.layers import find_layers, lay_out
    from gradwatch.rules import default_rules

    history, rules = History(lay_out(find_layers(WORKLOADS["deep"].model()))), default_rules()
    spread = np.random.default_rng(0)
    rows, steps, begun = [], 100 if quick else 400, 0
    for what, records in (("recent", 50), ("full", history.capacity)):
        while begun < records:
            take(history, begun, spread)
            begun += 1
        times: dict[bool, list[float]] = {True: [], False: []}
        with collected():
            for step in range(begun, begun + steps):
                take(history, step, spread)
                start = process_time()
                found = [finding for rule in rules for finding in rule(history) or ()]
                times[step % SAMPLED_EVERY == 0].append(process_time() - start)
                assert not found, f"a healthy history, and yet: {found}"
        begun += steps
        for sampled, taken in times.items():
            where = f"{what} history, {'sampled step' if sampled else 'step between'}"
            rows.append(Row("all default rules", where, bootstrap(median, np.array(taken)), MILLISECONDS, TARGET))
    return Table("rules", f"Rules over {len(history.layout.layers):,} layers", rows)


def take(history: History, step: int, spread: np.random.Generator) -> None:
    """Append a healthy record of `step`, with everything that a sampled step has at every 25th."""
    from gradwatch.core.record import Missing

    layout = history.layout
    codes = np.full(len(layout), int(Missing.MEASURED), dtype=np.int8)

    def about(value: float) -> Floats:
        return value * np.exp(0.1 * spread.standard_normal(len(layout)))

    values = {"grad_norm": about(1e-2), "grad_norm_clipped": about(1e-2)}
    if step % SAMPLED_EVERY == 0:
        usual = {"weight_norm": 5.0, "update_ratio": 1e-3, "signal_norm": 1e-2, "signal_rms": 1e-4, "output_rms": 1.0}
        values |= {statistic: about(value) for statistic, value in {**usual, "output_max": 4.0}.items()}
        values["zero_fraction"] = np.zeros(len(layout))
        values["run_order"] = np.full(len(layout), np.nan)
        values["run_order"][layout.layers] = np.arange(len(layout.layers))
    history.append(step, values=values, scalars={"loss": 2.0 * 0.999**step, "lr": 1e-3}, codes=codes)
