"""The texts of a run: metadata, alerts and verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradwatch.core.alert import Severity
from gradwatch.sinks.incident_line import health_of, under_way
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.schema import InvalidError, string_of
from gradwatch.tensorboard_plugin.record_data import RunRecord, end_of
from gradwatch.tensorboard_plugin.runs import RunTags, TensorBoardData

KINDS: tuple[run_metadata.Kind, ...] = ("meta", "alerts", "verdict")


def run_text(source: TensorBoardData, run: str, listing: RunTags, record: Callable[[], RunRecord]) -> dict[str, Any]:
    """`meta` and `verdict` as the file has them, None where it has none; `alerts`, worst first, as they last stood;
    `health`, as `sinks.incident_line` has it. The verdict has `stuck`, what the loss did where it did not fall.

    `record`: of the run; it is asked for where the texts are of several sessions. Left out are alerts of steps that a
    later session has too, and the verdict of one that was not the last.
    """
    texts = _texts(source, run, listing)
    began, meta = texts["meta"][-1] if texts["meta"] else (0.0, None)
    ended, verdict = texts["verdict"][-1] if texts["verdict"] else (0.0, None)
    alerts = [(written, alert) for written, fields in texts["alerts"] for alert in fields["alerts"]]
    alerts += [(written, alert) for written, fields in texts["verdict"] for alert in fields["incidents"]]
    dates = [written for kind in ("alerts", "verdict") for written, _ in texts[kind]]
    several = meta is not None and min(dates, default=np.inf) < meta["started"]  # TensorBoard keeps the last `meta`
    sessions = record().sessions if several else {}
    alerts = [(written, alert) for written, alert in alerts if alert["noticed"] < end_of(written, sessions)]
    stand = as_they_stand(alert for _, alert in sorted(alerts, key=lambda one: one[0]))
    verdict, judged = None if ended < began else verdict, under_way(())
    if verdict is not None:
        if several and record().steps > verdict["steps"]:  # it knows nothing of the sessions before
            levels = record().losses().levels
            own = levels and dict(zip(("first", "last"), levels, strict=True))
            verdict = {**verdict, "steps": record().steps, "loss": own, "run_steps": None}
        judged = run_metadata.verdict_of(verdict)
        verdict = {**verdict, "stuck": judged.stuck}
    health = health_of(replace(judged, incidents=tuple(map(run_metadata.alert_of, stand))))
    return {"meta": meta, "verdict": verdict, "alerts": stand, "health": health}


def as_they_stand(alerts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each incident once, the last that there is of it; worst first, then oldest first. Where it began on the x-axis an
    earlier session may know.
    """
    latest: dict[tuple[str, int], Mapping[str, Any]] = {}
    for alert in alerts:
        key = alert["rule"], alert["step"]
        began = latest[key]["axis"] if alert["axis"] is None and key in latest else alert["axis"]
        latest[key] = {**alert, "axis": began}
    return sorted(latest.values(), key=lambda alert: (-Severity(alert["severity"]).order, alert["step"]))


def onsets_of(alerts: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[int, int]:
    """Place among `names` -> the first step of the x-axis at which a warning or an error is about that layer or one of
    its parameters; origins come first, and of those the worst.
    """
    places = {name: place for place, name in enumerate(names)}
    loud = [alert for alert in alerts if alert["severity"] != Severity.NOTICE.value]
    found: dict[int, int] = {}
    sites = [(alert, alert["layer"]) for alert in loud] + [(alert, site) for alert in loud for site in alert["sites"]]
    for alert, site in sites:
        while site and site not in places:
            site = site.rpartition(".")[0]
        if site:
            began = alert["step"] if alert["axis"] is None else alert["axis"]
            found[places[site]] = min(began, found.get(places[site], began))
    return found


def _texts(source: TensorBoardData, run: str, listing: RunTags) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """Kind -> when each text was written, in seconds since 1970, and what it says."""
    tags = {kind: run_metadata.tag(kind) for kind in KINDS if kind in listing.texts}
    data = source.read(run, list(tags.values())) if tags else {}
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for kind, tag in tags.items():
        for datum in data.get(tag, ()):
            try:
                strings = datum.numpy.ravel().tolist()
                found[kind].append((datum.wall_time, run_metadata.read_text(kind, string_of(strings))))
            except InvalidError:  # damaged or of another GradWatch: what can be read counts
                continue
    return found
