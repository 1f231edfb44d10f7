"""The report: the verdict first, then the heatmaps, the alerts, the layers and the settings of a run."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.core.alert import Alert, Severity, Verdict, returns_text, short_list, step_word
from gradwatch.core.record import Missing
from gradwatch.core.statistics import CATALOGUE
from gradwatch.runs.names import time_text, with_short_names
from gradwatch.runs.pages import render
from gradwatch.runs.report.card import card
from gradwatch.runs.report.heatmap import IncidentMark, heatmap
from gradwatch.runs.report.loss_curve import curve
from gradwatch.runs.report.run_data import RunData
from gradwatch.runs.report.sparkline import sparkline
from gradwatch.sinks.run_summary import RowFault
from gradwatch.sinks.terminal.console import table_rows
from gradwatch.sinks.terminal.layer_table import format_percent, select_rows

MAX_ROWS = 1000
"""Layers in the table, at most: 0.6 MB. Judgement."""

MAX_OPEN_ROWS = 40
"""Layers in the table of which none is folded away: two pages of paper. Judgement."""

MAX_REMEDIES = 3
"""Incidents whose remedy is shown in the verdict; the alerts have all. Judgement."""

NUMBER_WIDTH = 7
"""Characters of a number in the table."""

MAX_LISTED_NAMES = 50
"""Names in a list, at most. Judgement."""

TITLES = {
    "grad_norm": "Gradient norm",
    "signal_rms": "Backward signal",
    "signal_norm": "Backward signal, norm",
    "update_ratio": "Update to weight",
}


def page(data: RunData, *, source: str = "") -> str:
    """HTML of one self-contained file, with the card in it. `source`: where the record is, for people."""
    verdict, summary = data.verdict, data.summary
    alerts = [_described(number, alert) for number, alert in enumerate(verdict.incidents, 1)]
    serious = [alert for alert in alerts if alert["severity"] != str(Severity.NOTICE)]
    facts = {
        "steps": f"{verdict.run_steps or verdict.steps:,}",
        "measured steps": f"{verdict.steps:,}" * (verdict.run_steps is not None),
        "layers": f"{verdict.layers:,}",
        "overhead": f"{100 * verdict.overhead:.1f} %",
        "took": _duration(data.meta) * (summary.steps >= verdict.steps),
    }
    notes = [f"Intervention: {text}" for text in verdict.interventions]
    notes += [f"Note: {text}" for text in (*verdict.notes, *data.notes)]
    if summary.steps < verdict.steps:
        steps = f"{summary.steps:,} {step_word(verdict)}s"
        notes.append(f"Note: the pictures and the table are of the {steps} that are recorded here")
    headline = f"{len(serious)} incident{'s' * (len(serious) > 1)}" if serious else data.status
    return render(
        "report.html",
        title=f"{headline} - GradWatch",
        made_from="the record of the run",
        source=source,
        card=base64.b64encode(card(data, source=Path(source).name).encode()).decode(),
        started=time_text(data.meta["started"]),
        kind=serious[0]["severity"] if serious else "" if verdict.failed else "ok",
        headline=f"{serious[0]['rule']} in {serious[0]['place']}" if len(serious) == 1 else headline,
        serious=serious,
        advised=MAX_REMEDIES,
        facts={name: text for name, text in facts.items() if text},
        notes=notes,
        pictures=_pictures(data),
        loss_curve=curve(data.loss, summary.grad_norm, summary.names[1:]),
        alerts=alerts,
        table=_table(data),
        meanings=_meanings(data),
        untrained=_untrained(verdict),
        environment=data.meta.get("environment", {}),
    )


def _described(number: int, alert: Alert) -> dict[str, Any]:
    """An alert as the page shows it. `number`: its place in the verdict, from 1."""
    sites = ", ".join(alert.sites)
    return {
        "number": number,
        "severity": str(alert.severity),
        "rule": alert.rule,
        "place": with_short_names(alert).where,
        "since": _since(alert),
        "returns": returns_text(alert.times),
        "message": alert.message,
        "effects": "; ".join(map(str, alert.effects)),
        "remedy": alert.remedy,
        "all_sites": sites if short_list(alert.sites) != sites else "",
        "count": len(alert.sites),
    }


def _pictures(data: RunData) -> list[dict[str, str]]:
    """A heatmap of each statistic that has one, the gradient norm first; none where no layer was measured."""
    names, courses = data.summary.names[1:], data.summary.courses
    if not names or not len(courses["grad_norm"]):
        return []
    marks = [
        IncidentMark(number, alert.severity, axis, f"{alert.rule}, step {alert.step}")
        for number, alert in enumerate(data.verdict.incidents, 1)
        if alert.severity is not Severity.NOTICE and (axis := data.begin(alert)) is not None
    ]
    found = []
    for name, course in courses.items():
        if not len(course) or (name == "signal_norm" and len(courses["signal_rms"])):
            continue
        each = f"the highest of {course.stride:,} steps" if course.stride > 1 else "one step"
        sampled = "; sampled, and shown until the next sample" if CATALOGUE[name].sampled else ""
        meaning = CATALOGUE[name].meaning.split(";")[0]
        note = f"{meaning}. Layers in model order from top to bottom; a column is {each}{sampled}."
        drawn = heatmap(course, names, severities=data.unhealthy, marks=marks, title=TITLES[name], note=note)
        found.append({"title": TITLES[name], "figure": drawn})
    return found


def _table(data: RunData) -> dict[str, Any] | None:
    """The table of the total and the layers; None where nothing was measured."""
    summary, names = data.summary, data.summary.names
    course = summary.grad_norm
    if not course.seen.any():
        return None
    faults = summary.faults_by_row(data.verdict)
    lines = table_rows(summary, faults)
    measured = bool((~np.isnan(summary.zeros)).any())
    at_fault = sorted(row - 1 for row in faults if row)
    shown = [0, *(place + 1 for place in select_rows(len(names) - 1, at_fault, MAX_ROWS))]
    rows = []
    for row in shown:
        line = lines[row]
        numbers = [*line.numbers(NUMBER_WIDTH).values(), *[format_percent(line.zero)] * measured]
        kind, status = _status(line.measured, summary.codes[row], faults.get(row, ())) if row else ("", "")
        rows.append(
            {
                "name": names[row],
                "module": summary.layout.sites[summary.places[row]].module,
                "trend": sparkline(line.low, line.high),
                "numbers": numbers,
                "kind": kind,
                "status": status,
            }
        )
    left_out, hidden = len(names) - len(shown), len({row for row in faults if row} - {*shown})
    with_alerts = f", {hidden:,} of them with alerts" * bool(hidden)
    note = (
        "Norm of each layer's gradient. trend: its logarithm, each line on its own scale; red where it is not finite."
        + (f" median: {course.median_of}." if course.median_of else "")
        + (" median, min and max are of the finite numbers." if np.isposinf(course.extremes()[1]).any() else "")
        + (" zero: share of the gradient that is exactly zero." if measured else "")
        + (f" {left_out:,} of {len(names) - 1:,} layers are left out{with_alerts}." if left_out else "")
    )
    heads = ["trend", "median", "min", "max", "last", *["zero"] * measured]
    if len(rows) <= MAX_OPEN_ROWS:
        return {"note": note, "heads": heads, "rows": rows, "folded": []}
    folded = [row for row in rows[1:] if row["kind"] == "ok"]
    return {"note": note, "heads": heads, "rows": [row for row in rows if row not in folded], "folded": folded}


def _status(seen: bool, code: int, faults: Sequence[RowFault]) -> tuple[str, str]:
    """The status of a layer: its CSS class and its text."""
    if faults:
        return str(faults[0].severity), ", ".join(dict.fromkeys(fault.text for fault in faults))
    return ("ok", "ok") if seen else ("notice", Missing(int(code)).reason)


def _meanings(data: RunData) -> dict[str, str]:
    """The meaning of the numbers of the page, by their names."""
    labels, about = data.meta.get("labels", {}), data.meta.get("about", {})
    every = data.meta.get("log_every_n_steps")
    apart = f"{every} steps" if every != 1 else "step"
    return {
        **{TITLES.get(name, name).lower(): text for name, text in labels.items() if text},
        **({"other statistics": f"recorded every {apart} at most"} if every else {}),
        "overhead": f"{100 * data.verdict.overhead:.2f} % of the step time, measured by GradWatch itself",
        **{name: text for name, text in about.items() if text},
    }


def _untrained(verdict: Verdict) -> list[dict[str, str]]:
    """The parameters that never got a gradient, by reason."""
    return [
        {
            "reason": reason,
            "count": f"{len(names):,} parameter{'s' * (len(names) > 1)}",
            "names": ", ".join(names[:MAX_LISTED_NAMES]) + " ..." * (len(names) > MAX_LISTED_NAMES),
        }
        for reason, names in verdict.untrained_by_reason.items()
    ]


def _since(alert: Alert) -> str:
    noticed = f" (noticed at {alert.noticed:,})" if alert.noticed != alert.step else ""
    if alert.closed_step is None:
        return f"since step {alert.step:,}{noticed}, still open"
    if alert.closed_step == alert.step:
        return f"at step {alert.step:,}{noticed}"
    return f"from step {alert.step:,}{noticed} to {alert.closed_step:,}"


def _duration(meta: Mapping[str, Any]) -> str:
    """From the start to the end; empty where that is not known, as of a run that was resumed."""
    begun, over = meta["started"], meta.get("finished")
    if over is None or over < begun:
        return ""
    seconds = round(over - begun)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    if not seconds:
        return "under 1 s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"
