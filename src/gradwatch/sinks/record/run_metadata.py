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
                run_steps: steps of the run, where some were not measured; else null, or not there;
                failed: whether GradWatch failed before the run ended; not there in old files}
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

from gradwatch.core.alert import Alert, Verdict, alert_to_dict
from gradwatch.core.record import Run
from gradwatch.core.typed_values import InvalidError, moment, typed
from gradwatch.core.versions import versions_of
from gradwatch.sinks.record.incident_spans import Key, Span
from gradwatch.sinks.record.limits import ALERTS_MAX, object_of

TEXT_VERSION = 1
"""Version of these texts: increased when an older GradWatch can no longer read them."""

Kind = Literal["meta", "alerts", "verdict"]

RUN_TAG_PREFIX = "gradwatch/run/"

RECORDED_PACKAGES = ("gradwatch", "torch", "lightning", "pytorch_lightning", "tensorboard", "numpy")
"""Packages whose versions are recorded."""

NOT_RECORDED = ("incident_file", "checkpoint")
"""The fields of an alert that are paths on the machine of the run."""


def tag(kind: Kind) -> str:
    return RUN_TAG_PREFIX + kind


def metadata(kind: Kind) -> bytes:
    """The metadata of a tag's first event: JSON."""
    return json.dumps({"version": TEXT_VERSION, "kind": kind}).encode()


def meta_text(run: Run, started: float) -> str:
    return _text(**meta_fields(run, started))


def meta_fields(run: Run, started: float) -> dict[str, Any]:
    """A run as values that JSON can hold; `started`: seconds since the epoch."""
    return {
        "gradwatch": versions_of(["gradwatch"])["gradwatch"],
        "started": started,
        "description": run.description,
        "labels": dict(run.labels),
        "log_every_n_steps": int(run.log_every_n_steps),
        "layers": len(run.layout.layers),
        "parameters": len(run.layout.parameters),
        "about": {str(name): str(text) for name, text in run.about.items()},
        "environment": environment(),
    }


def alerts_text(alerts: Iterable[Alert], spans: Mapping[Key, Span]) -> str:
    return _text(alerts=[fields_of(alert, spans) for alert in alerts])


def verdict_text(verdict: Verdict, spans: Mapping[Key, Span]) -> str:
    incidents = [fields_of(alert, spans) for alert in verdict.incidents]
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
        "failed": verdict.failed,
    }


def fields_of(alert: Alert, spans: Mapping[Key, Span]) -> dict[str, Any]:
    """An alert as values that JSON can hold, and where it lies on the x-axis; `read_text` reads them."""
    span = spans.get(alert.key, Span())
    fields = {name: value for name, value in alert_to_dict(alert).items() if name not in NOT_RECORDED}
    numbers = {name: _json_number(getattr(alert, name)) for name in ("value", "threshold")}
    return {**fields, **numbers, "axis": span.begin, "noticed_axis": span.noticed, "closed_axis": span.end}


META = {
    "gradwatch": str,
    "started": moment,
    "description": str,
    "labels": {str: str},
    "log_every_n_steps": int,
    "layers": int,
    "parameters": int,
    "about": {str: str},
    "environment": {str: str},
}

AXES = dict.fromkeys(("axis", "closed_axis", "noticed_axis"), int | None)


def _alert(value: Any, where: str) -> tuple[Alert, Span]:
    return typed(Alert, value, where), Span(*typed(AXES, value, where).values())


def _levels(value: Any, where: str) -> list[float] | None:
    return None if value is None else [*typed({"first": float, "last": float}, value, where).values()]


def read_text(kind: str, text: str | bytes) -> dict[str, Any]:
    """What a text of that kind says. Raises InvalidError.

    "meta": as above. "alerts": `alerts`, each with its span. "verdict": these, `finished`, and the `verdict` without
    them.
    """
    found = object_of(text, version=TEXT_VERSION)
    if kind == "meta":
        return typed(META, found)  # type: ignore[no-any-return]
    if kind == "alerts":
        read = typed({"alerts": [_alert]}, found)
    elif kind == "verdict":
        read = typed({"finished": moment, "incidents": [_alert], "loss": _levels}, found)
        verdict = typed(Verdict, {**found, "incidents": [], "loss": read["loss"]})
        read = {"finished": read["finished"], "verdict": verdict, "alerts": read["incidents"]}
    else:
        raise InvalidError(f"there is no {kind[:60]!r} of a run")
    if len(read["alerts"]) > ALERTS_MAX:
        raise InvalidError(f"{len(read['alerts']):,} alerts; {ALERTS_MAX:,} were expected at most")
    return read  # type: ignore[no-any-return]


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
