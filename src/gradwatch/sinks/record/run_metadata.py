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
                interventions: [text], incidents: [alert], worst first}
    alert      {rule, severity, layer, sites: [name], step, axis, value, threshold, message, remedy, closed_step,
                closed_axis, times}

`started` and `finished` are seconds since the epoch. `step` counts optimizer steps; `axis` is its position on the
x-axis of the Trainer's logs, as is the event's own step; null where an incident is open or its position unknown.
Numbers that JSON lacks are strings: "nan", "inf", "-inf".
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from gradwatch.core.alert import Alert, Severity, Verdict
from gradwatch.core.record import Run
from gradwatch.core.versions import versions_of

TEXT_VERSION = 1
"""Version of these texts: increased when an older GradWatch can no longer read them."""

Kind = Literal["meta", "alerts", "verdict"]

RUN_TAG_PREFIX = "gradwatch/run/"

RECORDED_PACKAGES = ("gradwatch", "torch", "lightning", "pytorch_lightning", "tensorboard", "numpy")
"""Packages whose versions are recorded."""

Axes = Mapping[tuple[str, int], tuple[int | None, int | None]]
"""(`rule`, `step`) of an incident -> begin and end on the x-axis; None where unknown."""


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
    return _text(
        finished=time.time(),
        healthy=verdict.healthy,
        steps=int(verdict.steps),
        layers=int(verdict.layers),
        overhead=float(verdict.overhead),
        untrained={str(name): str(reason) for name, reason in verdict.untrained.items()},
        notes=[str(note) for note in verdict.notes],
        interventions=[str(line) for line in verdict.interventions],
        incidents=[fields_of(alert, axes) for alert in verdict.incidents],
    )


def fields_of(alert: Alert, axes: Axes) -> dict[str, Any]:
    """An alert as values that JSON can hold; `alert_of` reads them."""
    axis, closed_axis = axes.get((alert.rule, alert.step), (None, None))
    return {
        "rule": str(alert.rule),
        "severity": alert.severity.value,
        "layer": str(alert.layer),
        "sites": [str(site) for site in alert.sites],
        "step": int(alert.step),
        "axis": axis,
        "value": _json_number(alert.value),
        "threshold": _json_number(alert.threshold),
        "message": str(alert.message),
        "remedy": str(alert.remedy),
        "closed_step": None if alert.closed_step is None else int(alert.closed_step),
        "closed_axis": closed_axis,
        "times": int(alert.times),
    }


def alert_of(fields: Mapping[str, Any]) -> Alert:
    """The alert of `fields_of`. Raises LookupError, TypeError or ValueError for other fields."""
    return Alert(
        str(fields["rule"]),
        Severity(fields["severity"]),
        str(fields["layer"]),
        tuple(str(site) for site in fields["sites"]),
        int(fields["step"]),
        float(fields["value"]),
        float(fields["threshold"]),
        str(fields["message"]),
        str(fields["remedy"]),
        closed_step=None if fields["closed_step"] is None else int(fields["closed_step"]),
        times=int(fields["times"]),
    )


def verdict_of(fields: Mapping[str, Any]) -> Verdict:
    """The verdict of `verdict_text`. Raises LookupError, TypeError or ValueError for other fields."""
    return Verdict(
        tuple(map(alert_of, fields["incidents"])),
        int(fields["steps"]),
        int(fields["layers"]),
        float(fields["overhead"]),
        {str(name): str(reason) for name, reason in dict(fields["untrained"]).items()},
        tuple(str(note) for note in fields["notes"]),
        tuple(str(line) for line in fields["interventions"]),
    )


def parsed(text: str | bytes) -> dict[str, Any]:
    """The fields of one of these texts. Raises ValueError for another version."""
    fields = json.loads(text)
    if not isinstance(fields, dict) or fields.get("version") != TEXT_VERSION:
        found = fields.get("version") if isinstance(fields, dict) else None
        raise ValueError(f"it is of version {found!r}, this GradWatch reads version {TEXT_VERSION}")
    return fields


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
