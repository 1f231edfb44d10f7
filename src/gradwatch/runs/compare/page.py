"""The comparison as a page: one self-contained HTML file, the answer first, then where and when, then every layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert, Severity
from gradwatch.core.record import Floats
from gradwatch.runs.compare.aligned import HIGHEST, LOWEST, key_of
from gradwatch.runs.compare.comparison import MAX_RATIO_DECADES, WORDS, Comparison, format_ratio, format_size
from gradwatch.runs.pages import render
from gradwatch.runs.report.downsampled_columns import Pool
from gradwatch.runs.report.heatmap import IncidentMark, heatmap
from gradwatch.runs.report.sparkline import sparkline

NAME = "gradwatch_comparison.html"

APART = 0.05
"""Share of the picture's width that lies between two marks at least: others came with the first. Judgement."""

WIDEST = 6.0
"""Decades of the ratio that are told apart in the picture. Judgement."""


def page(result: Comparison) -> str:
    """HTML."""
    return render(
        "comparison.html",
        title=result.headline,
        made_from="the records of two runs",
        kind="warning" if result.divergence_points else "ok",
        sentences=result.sentences,
        facts={
            "A": str(result.runs[0].path),
            "B": str(result.runs[1].path),
            "steps of both": f"{result.first_difference.steps:,}",
            "layers of both": f"{len(result.pair.layers):,}",
        },
        picture=_picture(result),
        points=_points(result),
        layers=_layers(result),
        runs=[
            {"letter": letter, "path": str(run.path), "verdict": str(run.verdict).split("\n"), "notes": run.notes}
            for letter, run in zip("AB", result.runs, strict=True)
        ],
    )


def _picture(result: Comparison) -> str:
    a, b = result.pair.sides["grad_norm"]
    keys, mine, other = np.intersect1d(a.keys, b.keys, return_indices=True)
    if not len(keys) or result.first_difference.first is None:
        return ""
    mine_logs, other_logs = a.logs[mine], b.logs[other]
    apart = np.minimum(np.abs(other_logs - mine_logs), WIDEST)
    apart[(mine_logs >= HIGHEST) != (other_logs >= HIGHEST)] = np.inf
    pool = _pooled(a.steps[mine], apart)
    severities = {point.layer: Severity.WARNING for point in result.divergence_points}
    layers = result.pair.layers
    marks: list[IncidentMark] = []
    for number, p in enumerate(result.divergence_points, 1):
        if not marks or p.step - marks[-1].axis >= APART * pool.stride * len(pool):
            alert = Alert("parts", Severity.WARNING, layers[p.layer], (), p.step, 0.0, 0.0, "", "")
            marks.append(IncidentMark(number, alert, p.step))
    each = f"the most of {pool.stride:,} steps" if pool.stride > 1 else "one step"
    note = (
        "Gradient norm of the one run over that of the other, whichever is larger; 1 is no difference. Layers in the "
        f"order of A from top to bottom; a column is {each}."
    )
    if marks:
        note += " Marks: where layers part, numbered as below; one that parts soon after another has none."
    return heatmap(pool, layers, severities=severities, marks=marks, title="How far apart", note=note)


def _pooled(steps: NDArray[np.int64], decades: Floats) -> Pool:
    """A pool of ratios, of which the first row stands for the total."""
    pool = Pool()
    for step, row in zip(steps, decades, strict=True):
        pool.add(int(step), 10.0 ** np.concatenate([[0.0], row]))
    return pool


def _points(result: Comparison) -> list[dict[str, Any]]:
    """Where each layer parts."""
    rows = []
    for point in result.divergence_points:
        a, b = point.values
        ratio = format_ratio(b - a) if abs(b - a) < MAX_RATIO_DECADES else "-"
        noise = format_ratio(min(point.noise, 9.0))
        rows.append(
            {
                "layer": result.pair.layers[point.layer],
                "statistic": WORDS[point.statistic],
                "numbers": (f"{point.step:,}", format_size(a), format_size(b), ratio, noise),
            }
        )
    return rows


def _layers(result: Comparison) -> list[dict[str, Any]]:
    """The total and each layer in both runs, and the step at which it parts, if it does."""
    pools = [Pool(), Pool()]
    for pool, run, side in zip(pools, result.runs, result.pair.sides["grad_norm"], strict=True):
        series = run.values["grad_norm"]
        totals = dict(zip(key_of(series.steps, series.optimizers).tolist(), series.numbers[:, 0].tolist(), strict=True))
        for key, step, logs in zip(side.keys.tolist(), side.steps.tolist(), side.logs, strict=True):
            with np.errstate(over="ignore"):
                numbers = np.where(logs >= HIGHEST, np.inf, np.where(logs <= LOWEST, 0.0, 10.0**logs))
            measured = np.concatenate([[True], ~np.isnan(logs)])
            pool.add(step, np.concatenate([[totals[key]], numbers]), measured)
    layers = ("total", *result.pair.layers)
    parted = {point.layer + 1: point.step for point in result.divergence_points}
    (low_a, high_a), (low_b, high_b) = (pool.columns(len(layers)) for pool in pools)
    return [
        {
            "name": name,
            "trends": [sparkline(low[:, row], high[:, row]) for low, high in ((low_a, high_a), (low_b, high_b))],
            "step": f"{parted[row]:,}" if row in parted else None,
        }
        for row, name in enumerate(layers)
    ]
