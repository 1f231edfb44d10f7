"""The report of many runs: one page with a line for each, so that the unhealthy ones and what differs are seen."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from urllib.parse import quote

from gradwatch.core.alert import Verdict, health_of
from gradwatch.runs.names import counted, shortened, time_text
from gradwatch.runs.pages import figure, render
from gradwatch.runs.report.heatmap import small_map
from gradwatch.runs.report.loss_curve import HEIGHT, path_of
from gradwatch.runs.report.run_data import RunData
from gradwatch.runs.report.sink import NAME
from gradwatch.sinks.terminal.layer_table import format_number

PAGE_NAME = "gradwatch_runs.html"

MAP_ROWS = 40
"""Rows of a small map, at most: its pixels."""

MAX_SETTINGS = 4
"""Settings that have a column, at most. Judgement: the width of a page."""

ORDER = {"error": 3, "warning": 2, "no end": 1, "gradwatch failed": 1}


@dataclass(frozen=True, slots=True, eq=False)
class RunLine:
    """What the page needs of one run: its numbers are not kept."""

    path: Path
    name: str
    health: str
    """As `health_of` says it."""
    found: str
    steps: str
    """How many, and how many of them are recorded here where the run was resumed in another folder."""
    began: float
    """Seconds since the epoch."""
    loss: str
    curve: str
    rate: str
    """The learning rate: the first, the highest and the last."""
    settings: dict[str, str]
    picture: str


def _steps(data: RunData) -> str:
    verdict, recorded = data.verdict, data.summary.steps
    if recorded < verdict.steps:
        return f"{recorded:,} of {verdict.steps:,} recorded here"
    if verdict.run_steps is not None:
        return f"{verdict.run_steps:,}, {verdict.steps:,} of them measured"
    return f"{verdict.steps:,}"


def line_of(data: RunData, path: Path, name: str) -> RunLine:
    verdict, course = data.verdict, data.summary.grad_norm
    serious = data.serious
    picture = loss = curve = ""
    if len(data.summary.names) > 1 and len(course):
        picture = small_map(data, MAP_ROWS)
        path_, _ = path_of(data.loss, course)
        curve = figure("small_curve", columns=len(course), height=HEIGHT, path=path_) if path_ else ""
    if data.loss_levels is not None:
        loss = " → ".join(format_number(level, 7) if isfinite(level) else "not finite" for level in data.loss_levels)
    return RunLine(
        path,
        name,
        health_of(verdict),
        data.status.partition(": ")[2] if serious else _nothing_found(verdict),
        _steps(data),
        data.meta["started"],
        loss,
        curve,
        _rate(data.rates),
        {**data.meta.get("about", {}), **data.meta.get("environment", {})},
        picture,
    )


def _nothing_found(verdict: Verdict) -> str:
    return "none before GradWatch failed" if verdict.failed else verdict.stuck or "none"


def page_of_many(lines: Sequence[RunLine], *, out: Path, source: str, notes: Iterable[str]) -> str:
    """HTML. `out`: where the page will be; `notes`: runs that could not be read, and why."""
    ordered = sorted(lines, key=lambda line: (-ORDER.get(line.health, 0), -line.began))
    unhealthy = sum(line.health in ("error", "warning") for line in ordered)
    settings = differing(ordered)
    worst = ordered[0].health
    return render(
        "runs.html",
        title=f"{unhealthy:,} of {counted(len(ordered), 'run')} with incidents"
        if unhealthy
        else f"No incident in {counted(len(ordered), 'run')}",
        made_from="the records of the runs",
        source=source,
        kind=worst if worst in ("error", "warning") else "" if worst == "gradwatch failed" else "ok",
        facts={"runs": f"{len(ordered):,}", "with incidents": f"{unhealthy:,}"},
        notes=list(notes),
        settings=settings,
        lines=[
            {
                "run": line,
                "report": _report(line.path, out),
                "kind": {"error": "error", "warning": "warning", "healthy": "ok"}.get(line.health, ""),
                "settings": [shortened(line.settings.get(name, "-"), 40) for name in settings],
                "began": time_text(line.began),
            }
            for line in ordered
        ],
    )


def differing(lines: Sequence[RunLine]) -> list[str]:
    """The settings that differ between the runs, those with the most values first."""
    names = dict.fromkeys(name for line in lines for name in line.settings)
    values = {name: len({line.settings.get(name) for line in lines}) for name in names}
    return sorted((name for name in names if values[name] > 1), key=lambda name: (-values[name], name))[:MAX_SETTINGS]


def _report(path: Path, out: Path) -> str:
    """The link to a run's own report, where it has one."""
    own = (path if path.is_dir() else path.parent) / NAME
    return quote(os.fsencode(os.path.relpath(own.resolve(), out.parent.resolve()))) if own.is_file() else ""


def _rate(rates: tuple[float, float, float] | None) -> str:
    if rates is None:
        return "-"
    first, highest, last = rates
    shown = [first] if first == highest == last else [first, last] if highest <= max(first, last) else [*rates]
    return " → ".join(format_number(rate, 7) for rate in shown)
