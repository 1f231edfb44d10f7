"""The comparison as a page: one self-contained HTML file, the answer first, then where and when, then every layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwatch.core.alert import Severity
from gradwatch.core.record import MEASURED
from gradwatch.runs.compare.aligned import HIGHEST
from gradwatch.runs.compare.comparison import WORDS, Comparison, format_ratio, format_size
from gradwatch.runs.pages import render
from gradwatch.runs.report.heatmap import IncidentMark, heatmap
from gradwatch.runs.report.sparkline import sparkline
from gradwatch.sinks.downsampling import Downsampling

NAME = "gradwatch_comparison.html"

MIN_MARK_DISTANCE = 0.05
"""Share of the picture's width between two marks, at least; later ones in between get none. Judgement."""

MAX_OPEN_ROWS = 40
"""Layers in the table of which none is folded away: two pages of paper. Judgement."""

MAX_DECADES = 6.0
"""Decades of the ratio that the picture shows to either side, at most. Judgement."""


def page(result: Comparison) -> str:
    """HTML."""
    layers = _layers(result)
    folds = len(layers) > MAX_OPEN_ROWS
    return render(
        "comparison.html",
        title=result.headline,
        made_from="the records of two runs",
        kind="warning" if result.divergence_points else "ok",
        sentences=result.sentences,
        facts={
            **{name: f"{a} in A, {b} in B" for name, a, b in result.settings},
            "A": str(result.runs[0].path),
            "B": str(result.runs[1].path),
            "steps of both" if result.every == 1 else "compared steps": f"{result.first_difference.steps:,}",
            "layers of both": f"{len(result.pair.layers):,}",
        },
        picture=_picture(result),
        points=_points(result),
        layers=[layers[0], *(layer for layer in layers[1:] if not folds or layer["step"] is not None)],
        folded=[layer for layer in layers[1:] if folds and layer["step"] is None],
        runs=[
            {"letter": letter, "path": str(run.path), "verdict": run.verdict.lines, "notes": run.notes}
            for letter, run in zip("AB", result.runs, strict=True)
        ],
    )


def _picture(result: Comparison) -> str:
    steps, a, b = result.pair.shared("grad_norm")
    if not len(steps) or result.first_difference.first is None:
        return ""
    apart = np.clip(b - a, -MAX_DECADES, MAX_DECADES)
    apart[(a >= HIGHEST) != (b >= HIGHEST)] = np.inf
    course = Downsampling(1 + len(result.pair.layers))
    course.extend(steps, 10.0 ** np.pad(apart, ((0, 0), (1, 0))))  # the first row stands for the total
    severities = {point.layer: Severity.WARNING for point in result.divergence_points}
    layers = result.pair.layers
    marks: list[IncidentMark] = []
    for number, p in enumerate(result.divergence_points, 1):
        if not marks or p.step - marks[-1].axis >= MIN_MARK_DISTANCE * course.stride * len(course):
            marks.append(IncidentMark(number, Severity.WARNING, p.step, f"diverges, step {p.step}"))
    each = f"the most of {course.stride:,} steps" if course.stride > 1 else "one step"
    note = (
        "Gradient norm of B over that of A: grey is the same, blue less in B, brown more. Layers in the order of A "
        f"from top to bottom; a column is {each}."
    )
    if marks:
        note += " Marks: where layers diverge, numbered as below; one that diverges soon after another has none."
    return heatmap(course, layers, severities=severities, marks=marks, title="B against A", note=note, diverging=True)


def _points(result: Comparison) -> list[dict[str, Any]]:
    """Where each layer diverges."""
    rows = []
    for point in result.divergence_points:
        a, b = point.values
        ratio = format_ratio(b - a) or "-"
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
    """The total and each layer in both runs, and the step at which it diverges, if it does."""
    trends, layers = [], ("total", *result.pair.layers)
    for run in result.runs:
        series, places = run.values["grad_norm"], [0, *(run.layout.index[name] for name in result.pair.layers)]
        course = Downsampling(len(places))
        course.extend(series.steps, series.numbers[:, places].astype(np.float64), run.codes[:, places] == MEASURED)
        trends.append(course.extremes())
    diverged = {point.layer + 1: point.step for point in result.divergence_points}
    return [
        {
            "name": name,
            "trends": [sparkline(low[:, row], high[:, row]) for low, high in trends],
            "step": f"{diverged[row]:,}" if row in diverged else None,
        }
        for row, name in enumerate(layers)
    ]
