"""The texts of a run's event file besides its numbers: description, alerts and verdict, each as JSON under a tag.

    gradwatch/run/meta       the run, its labels and environment; at the start, and again when layers are added
    gradwatch/run/alerts     all incidents so far in their present state; at most a second after one changed
    gradwatch/run/verdict    the summary; at the end. A run without one was killed, or is still running

Each is a string tensor of shape [] for the plugin `gradwatch`; the metadata of the tag's first event is
`{"version", "kind"}`. The latest event of a tag has all that this session of the run knows. For a resumed run, merge
the `alerts` of all sessions by (`rule`, `step`); later ones replace earlier ones.

    meta       {version, gradwatch, started, description, labels: {statistic: text}, log_every_n_steps, layers,
                parameters, about: {what the Trainer says: text}, environment: {package or place: text}}
    alerts     {version, alerts: [alert]}
    verdict    {version, finished, healthy, steps, layers, overhead, untrained: {parameter: reason}, notes: [text],
                interventions: [text], incidents: [alert], worst first, loss: {first, last} or null,
                run_steps: steps of the run, where some were not measured; else null, or not there}
    alert      {rule, severity, layer, sites: [name], step, noticed, axis, noticed_axis, value, threshold, message,
                remedy, closed_step, closed_axis, times, headline, effects: [effect]}
    effect     {rule, sites: [name], layer, step, noticed}; in old files without the last three

`started` and `finished` are seconds since the epoch. `step` counts optimizer steps; `axis` is its position on the
x-axis of the Trainer's logs, as is the event's own step; null where an incident is open or its position unknown.
Numbers that JSON lacks are strings: "nan", "inf", "-inf".
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from time import time
from typing import Any, Literal

from gradwatch.core.alert import Alert, Severity, Verdict, alert_from_dict, alert_to_dict
from gradwatch.core.record import Run
from gradwatch.core.versions import versions_of
from gradwatch.sinks.record import schema
from gradwatch.sinks.record.incident_spans import Key, Span

TEXT_VERSION = 1
"""Version of these texts: increased when an older GradWatch can no longer read them."""

Kind = Literal["meta", "alerts", "verdict"]

RUN_TAG_PREFIX = "gradwatch/run/"

RECORDED_PACKAGES = ("gradwatch", "torch", "lightning", "pytorch_lightning", "tensorboard", "numpy")
"""Packages whose versions are recorded."""

Axes = Mapping[Key, Span]
"""(`rule`, `step`) of an incident -> begin and end on the x-axis; None where unknown."""

NOT_RECORDED = ("incident_file", "checkpoint")
"""The fields of an alert that are paths on the machine of the run."""


def tag(kind: Kind) -> str:
    return RUN_TAG_PREFIX + kind


def metadata(kind: Kind) -> bytes:
    """The metadata of a tag's first event: JSON."""
    return json.dumps({"version": TEXT_VERSION, "kind": kind}).encode()


def meta_text(run: Run, started: float) -> str:
    """`started`: seconds since the epoch."""
    return _text(
        gradwatch=versions_of(["gradwatch"])["gradwatch"],
        started=started,
        description=run.description,
        labels=dict(run.labels),
        log_every_n_steps=int(run.log_every_n_steps),
        layers=len(run.layout.layers),
        parameters=len(run.layout.parameters),
        about={str(name): str(text) for name, text in run.about.items()},
        environment=environment(),
    )


def alerts_text(alerts: Iterable[Alert], axes: Axes) -> str:
    return _text(alerts=[fields_of(alert, axes) for alert in alerts])


def verdict_text(verdict: Verdict, axes: Axes) -> str:
    incidents = [fields_of(alert, axes) for alert in verdict.incidents]
    return _text(finished=time(), **verdict_fields(verdict), incidents=incidents)


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """A verdict without its incidents as values that JSON can hold."""
    loss = verdict.loss and dict(zip(("first", "last"), map(_json_number, verdict.loss), strict=True))
    return {
        "healthy": verdict.healthy,
        "steps": int(verdict.steps),
        "layers": int(verdict.layers),
        "overhead": _json_number(verdict.overhead),
        "untrained": {str(name): str(reason) for name, reason in verdict.untrained.items()},
        "notes": [str(note) for note in verdict.notes],
        "interventions": [str(line) for line in verdict.interventions],
        "loss": loss,
        "run_steps": verdict.run_steps,
    }


def fields_of(alert: Alert, axes: Axes) -> dict[str, Any]:
    """An alert as values that JSON can hold, and where it lies on the x-axis; `alert_of` reads them."""
    span = axes.get((alert.rule, alert.step), Span())
    fields = {name: value for name, value in alert_to_dict(alert).items() if name not in NOT_RECORDED}
    numbers = {name: _json_number(getattr(alert, name)) for name in ("value", "threshold")}
    return {**fields, **numbers, "axis": span.begin, "noticed_axis": span.noticed, "closed_axis": span.end}


def alert_of(fields: Mapping[str, Any]) -> Alert:
    """The alert of `fields_of`, as `read_text` gives it."""
    numbers = {name: float(fields[name]) for name in ("value", "threshold")}
    own = {name: value for name, value in fields.items() if not name.endswith("axis")}
    return alert_from_dict({**own, **numbers})


def verdict_of(fields: Mapping[str, Any]) -> Verdict:
    """The verdict of `verdict_text`, as `read_text` gives it."""
    return Verdict(
        tuple(map(alert_of, fields["incidents"])),
        fields["steps"],
        fields["layers"],
        float(fields["overhead"]),
        fields["untrained"],
        tuple(fields["notes"]),
        tuple(fields["interventions"]),
        loss=None if fields["loss"] is None else (float(fields["loss"]["first"]), float(fields["loss"]["last"])),
        run_steps=fields["run_steps"],
    )


def _checked_number(value: Any, where: str) -> float | str:
    return _json_number(schema.number(value, where))


_SITES = schema.list_of(schema.name, schema.PARAMETERS_MAX)

_EFFECT = schema.with_defaults(
    schema.fields(
        rule=schema.name,
        sites=_SITES,
        layer=schema.text,
        step=schema.maybe(schema.step),
        noticed=schema.maybe(schema.step),
    ),
    layer="",
    step=None,
    noticed=None,
)

ALERT_FIELDS: Mapping[str, schema.Check] = {
    "rule": schema.name,
    "severity": schema.one_of(*(severity.value for severity in Severity)),
    "layer": schema.name,
    "sites": _SITES,
    "step": schema.step,
    "noticed": schema.step,
    "value": _checked_number,
    "threshold": _checked_number,
    "message": schema.text,
    "remedy": schema.text,
    "closed_step": schema.maybe(schema.step),
    "times": schema.whole(1),
    "headline": schema.text,
    "effects": schema.list_of(_EFFECT, schema.STATISTICS_MAX),
}
"""What an alert is in any file."""

ALERT = schema.fields(
    **ALERT_FIELDS, **dict.fromkeys(("axis", "noticed_axis", "closed_axis"), schema.maybe(schema.step))
)

TEXTS: Mapping[str, schema.Check] = {
    "meta": schema.fields(
        gradwatch=schema.text,
        started=schema.moment,
        description=schema.text,
        labels=schema.mapping_of(schema.text, schema.STATISTICS_MAX),
        log_every_n_steps=schema.whole(1),
        layers=schema.step,
        parameters=schema.step,
        about=schema.mapping_of(schema.text, schema.STATISTICS_MAX),
        environment=schema.mapping_of(schema.text, schema.STATISTICS_MAX),
    ),
    "alerts": schema.fields(alerts=schema.list_of(ALERT, schema.ALERTS_MAX)),
    "verdict": schema.with_defaults(
        schema.fields(
            finished=schema.moment,
            healthy=schema.of_type(bool, "true or false"),
            steps=schema.step,
            layers=schema.step,
            overhead=_checked_number,
            untrained=schema.mapping_of(schema.text, schema.PARAMETERS_MAX),
            notes=schema.list_of(schema.text, schema.ALERTS_MAX),
            interventions=schema.list_of(schema.text, schema.ALERTS_MAX),
            incidents=schema.list_of(ALERT, schema.ALERTS_MAX),
            loss=schema.maybe(schema.fields(first=_checked_number, last=_checked_number)),
            run_steps=schema.maybe(schema.step),
        ),
        run_steps=None,
    ),
}
"""Kind -> what its text has to be."""


def read_text(kind: str, text: str | bytes) -> dict[str, Any]:
    """The fields of a text of that kind, checked; values that JSON can hold. Raises InvalidError."""
    if kind not in TEXTS:
        raise schema.InvalidError(f"there is no {kind[:60]!r} of a run")
    found: dict[str, Any] = TEXTS[kind](schema.document(text, version=TEXT_VERSION), "")
    return found


def environment() -> dict[str, str]:
    """Versions of packages, the operating system and the machine type; no name of a user, machine or folder."""
    return {
        "python": platform.python_version(),
        **versions_of(RECORDED_PACKAGES),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _text(**fields: Any) -> str:
    return json.dumps({"version": TEXT_VERSION, **fields})


def _json_number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))
