"""The page: the verdict first, then where and when, then everything else there is to know of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from gradwatch.core.alert import Alert, Severity, Verdict, short_list
from gradwatch.core.record import Missing
from gradwatch.core.statistics import CATALOGUE
from gradwatch.runs.report.document import document
from gradwatch.runs.report.heatmap import Mark, heatmap
from gradwatch.runs.report.loss_curve import curve
from gradwatch.runs.report.run_data import RunData
from gradwatch.runs.report.sparkline import sparkline
from gradwatch.sinks.terminal.layer_table import format_number, format_percent, select_rows

ROWS = 1000
"""Layers in the table at most: 0.6 MB. Judgement."""

ADVISED = 3
"""Incidents whose remedy is in the verdict; that of the others is with the alerts. Judgement: a glance."""

NUMBER = 7
"""Characters of a number in the table."""

TITLES = {
    "grad_norm": "Gradient norm",
    "signal_rms": "Backward signal",
    "signal_norm": "Backward signal, norm",
    "update_ratio": "Update to weight",
}


def page(data: RunData, *, source: str = "") -> str:
    """HTML of one self-contained file. `source`: where the record is, for people."""
    verdict = data.verdict
    loud = [alert for alert in verdict.incidents if alert.severity is not Severity.NOTICE]
    title = f"{headline(verdict)} - GradWatch"
    parts = [
        _header(data, source),
        _verdict(data, loud),
        _pictures(data),
        _alerts(data),
        _table(data),
        _trust(data),
        _environment(data),
    ]
    return document(title, parts, made_from="the record of the run")


def headline(verdict: Verdict) -> str:
    loud = sum(alert.severity is not Severity.NOTICE for alert in verdict.incidents)
    if not verdict.steps:
        return "No step was measured"
    if not loud:
        return "Healthy"
    return f"{loud} incident{'s' * (loud > 1)}"


def _header(data: RunData, source: str) -> str:
    when = data.meta.get("started")
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) if isinstance(when, int | float) else ""
    where = f"<span>{escape(source)}</span>" if source else ""
    return f"<header><b>GradWatch report</b>{where}<span>{began}</span></header>"


def _verdict(data: RunData, loud: Sequence[Alert]) -> str:
    verdict = data.verdict
    kind = loud[0].severity.value if loud else "ok" if verdict.steps else "none"
    first = headline(verdict)
    if len(loud) == 1:
        first = f"{loud[0].rule} in {_where(loud[0])}"
    lines = "".join(
        f'<li><span class="chip {alert.severity}">{alert.severity}</span> '
        + (
            f'<a href="#alert-{number}"><b>{escape(alert.rule)}</b> in {escape(_where(alert))}</a>, '
            if loud[1:]
            else ""
        )
        + _since(alert)
        + (f'<p class="try"><b>Try:</b> {escape(alert.remedy)}</p></li>' if number <= ADVISED else "</li>")
        for number, alert in enumerate(verdict.incidents, 1)
        if alert.severity is not Severity.NOTICE
    )
    facts = {
        "steps": f"{verdict.steps:,}",
        "layers": f"{verdict.layers:,}",
        "overhead": f"{100 * verdict.overhead:.1f} %",
        "took": _duration(data.meta),
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in facts.items() if text)
    told = [f"Intervention: {what}" for what in verdict.interventions]
    told += [f"Note: {note}" for note in (*verdict.notes, *data.notes)]
    said = "".join(f'<p class="note">{escape(line)}</p>' for line in told)
    return (
        f'<section class="verdict {kind}"><h1>{escape(first)}</h1>{f"<ol>{lines}</ol>" if lines else ""}'
        f'<dl class="facts">{listed}</dl>{said}</section>'
    )


def _pictures(data: RunData) -> str:
    names = data.names[1:]
    if not names or not len(data.pools["grad_norm"]):
        return ""
    ill = {
        row - 1: alerts[0].severity
        for row, alerts in data.alerts_by_row().items()
        if row and alerts[0].severity is not Severity.NOTICE
    }
    marks = [
        Mark(number, alert, axis)
        for number, alert in enumerate(data.verdict.incidents, 1)
        if alert.severity is not Severity.NOTICE and (axis := _axis(data, alert)) is not None
    ]
    drawn = [name for name, pool in data.pools.items() if len(pool) and (name != "signal_norm" or _no_rms(data))]

    def picture(name: str) -> str:
        pool = data.pools[name]
        each = f"the highest of {pool.stride:,} steps" if pool.stride > 1 else "one step"
        sampled = "; sampled, and shown until the next sample" if CATALOGUE[name].sampled else ""
        meaning = CATALOGUE[name].meaning.split(";")[0]
        note = f"{meaning}. Layers in model order from top to bottom; a column is {each}{sampled}."
        return heatmap(pool, names, ill=ill, marks=marks, title=TITLES[name], note=note)

    others = "".join(f"<details><summary>{TITLES[name]}</summary>{picture(name)}</details>" for name in drawn[1:])
    loss = curve(data.loss, data.pools["grad_norm"], names) if len(data.loss) else ""
    return f"<section><h2>Where and when</h2>{picture('grad_norm')}{loss}{others}</section>"


def _alerts(data: RunData) -> str:
    cards = []
    for number, alert in enumerate(data.verdict.incidents, 1):
        back = f", came back {alert.times - 1} time{'s' * (alert.times > 2)}" if alert.times > 1 else ""
        cards.append(
            f'<article class="alert {alert.severity}" id="alert-{number}"><h3><span>{number}.</span>'
            f'<span class="chip {alert.severity}">{alert.severity}</span><span>{escape(alert.rule)} in '
            f"{escape(_where(alert))}</span></h3>"
            f'<p class="note">{_since(alert)}{back}</p><p>{escape(alert.message)}</p>'
            f'<p class="try"><b>Try:</b> {escape(alert.remedy)}</p>{_all_sites(alert)}</article>'
        )
    if not cards:
        return ""
    return f"<section><h2>Alerts</h2>{''.join(cards)}</section>"


def _all_sites(alert: Alert) -> str:
    if short_list(alert.sites) == ", ".join(alert.sites):
        return ""
    sites = ", ".join(alert.sites)
    return (
        f'<details><summary class="note">all {len(alert.sites)}</summary><p class="note">{escape(sites)}</p></details>'
    )


def _table(data: RunData) -> str:
    digest, names = data.digest, data.names
    if not names or not digest.seen.any():
        return ""
    low, high = data.pools["grad_norm"].columns(len(names))
    alerts = data.alerts_by_row()
    columns = [digest.median, digest.minimum, digest.maximum, digest.last]
    measured = bool((~np.isnan(data.zeros)).any())
    shown = [0, *(place + 1 for place in select_rows(len(names) - 1, sorted(row - 1 for row in alerts if row), ROWS))]
    rows = []
    for row in shown:
        if digest.seen[row]:
            numbers = "".join(f"<td>{format_number(float(column[row]), NUMBER)}</td>" for column in columns)
        else:
            numbers = "<td>-</td>" * len(columns)
        zero = f"<td>{format_percent(float(data.zeros[row]))}</td>" if measured else ""
        status = _status(data, row, alerts.get(row, ())) if row else ""
        name = f'{escape(names[row])} <span class="note">{escape(data.modules[row])}</span>'
        line = f"<td>{sparkline(low[:, row], high[:, row])}</td>"
        rows.append(f'<tr><td>{name}</td>{line}{numbers}{zero}<td class="s">{status}</td></tr>')
    heads = ["trend", "median", "min", "max", "last", *["zero"] * measured]
    header = "".join(f"<th{' class=s' * (head == 'trend')}>{head}</th>" for head in heads)
    left_out = len(names) - len(shown)
    note = (
        "Norm of each layer's gradient. trend: its logarithm, each line on its own scale; red where it is not finite."
        + (" zero: share of the gradient that is exactly zero." if measured else "")
        + (f" {left_out:,} layers without alerts are left out." if left_out else "")
    )
    return (
        f'<section><h2>Layers</h2><p class="note">{note}</p><div class="wide"><table class="layers"><thead><tr>'
        f'<th>layer</th>{header}<th class="s">status</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _status(data: RunData, row: int, alerts: Sequence[Alert]) -> str:
    if alerts:
        rules = ", ".join(dict.fromkeys(alert.rule for alert in alerts))
        return f'<span class="{alerts[0].severity}">{escape(rules)}</span>'
    if data.digest.seen[row]:
        return '<span class="ok">ok</span>'
    return f'<span class="notice">{escape(Missing(int(data.codes[row])).reason)}</span>'


def _trust(data: RunData) -> str:
    labels = {str(name): str(text) for name, text in dict(data.meta.get("labels", {})).items() if text}
    about = {str(name): str(text) for name, text in dict(data.meta.get("about", {})).items() if text}
    verdict = data.verdict
    every = data.meta.get("log_every_n_steps")
    apart = f"{every} steps" if every != 1 else "step"
    rows = {
        **{TITLES.get(name, name).lower(): text for name, text in labels.items()},
        **({"other statistics": f"recorded every {apart} at most"} if every else {}),
        "overhead": f"{100 * verdict.overhead:.2f} % of the step time, measured by GradWatch itself",
        **about,
    }
    untrained = ""
    if verdict.untrained:
        by_reason: dict[str, list[str]] = {}
        for name, reason in verdict.untrained.items():
            by_reason.setdefault(reason, []).append(name)
        untrained = "".join(
            f"<p>Never got a gradient, {escape(reason)}: {len(names):,} parameter{'s' * (len(names) > 1)}. "
            f'<span class="note">{escape(", ".join(names[:SPELT]))}{" ..." * (len(names) > SPELT)}</span></p>'
            for reason, names in by_reason.items()
        )
    return f"<section><h2>What the numbers are</h2>{_pairs(rows)}{untrained}</section>"


SPELT = 50
"""Names spelt out in one place. Judgement."""


def _environment(data: RunData) -> str:
    environment = {str(name): str(text) for name, text in dict(data.meta.get("environment", {})).items()}
    return f"<section><h2>Environment</h2>{_pairs(environment)}</section>" if environment else ""


def _pairs(rows: Mapping[str, str]) -> str:
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f'<table class="plain"><tbody>{lines}</tbody></table>'


def _where(alert: Alert) -> str:
    return short_list(alert.sites or (alert.layer,))


def _since(alert: Alert) -> str:
    if alert.closed_step is None:
        return f"since step {alert.step:,}, still open"
    if alert.closed_step == alert.step:
        return f"at step {alert.step:,}"
    return f"from step {alert.step:,} to {alert.closed_step:,}"


def _axis(data: RunData, alert: Alert) -> int | None:
    return data.spans.get((alert.rule, alert.step), (alert.step, None))[0]


def _no_rms(data: RunData) -> bool:
    return not len(data.pools["signal_rms"])


def _duration(meta: Mapping[str, Any]) -> str:
    """From the first step to the end."""
    begun, over = meta.get("started"), meta.get("finished")
    if not isinstance(begun, int | float) or not isinstance(over, int | float) or over < begun:
        return ""
    seconds = round(over - begun)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"
