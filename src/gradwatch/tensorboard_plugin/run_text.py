"""What a run says of itself in words: its alerts, its verdict, and what it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gradwatch.core.alert import Severity
from gradwatch.sinks.record import run_metadata
from gradwatch.tensorboard_plugin.runs import RunTags, TensorBoardData

KINDS: tuple[run_metadata.Kind, ...] = ("meta", "alerts", "verdict")


def run_text(source: TensorBoardData, run: str, listing: RunTags) -> dict[str, Any]:
    """`meta` and `verdict` as the file has them, None where it has none; `alerts`, worst first, as they last stood."""
    texts = _texts(source, run, listing)
    latest = {kind: said[-1] if said else None for kind, said in texts.items()}
    verdict = latest["verdict"]
    spoken = [*(alert for said in texts["alerts"] for alert in _alerts(said, "alerts")), *_alerts(verdict, "incidents")]
    return {"meta": latest["meta"], "verdict": verdict, "alerts": laid_over(spoken)}


def laid_over(alerts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each incident once, as it was spoken of last; worst first, then oldest first."""
    stands = {(alert["rule"], alert["step"]): alert for alert in alerts}
    return sorted(stands.values(), key=lambda alert: (-Severity(alert["severity"]).order, alert["step"]))


def _texts(source: TensorBoardData, run: str, listing: RunTags) -> dict[str, list[dict[str, Any]]]:
    tags = {kind: run_metadata.tag(kind) for kind in KINDS if kind in listing.facts}
    data = source.read(run, list(tags.values())) if tags else {}
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for kind, tag in tags.items():
        for datum in data.get(tag, ()):
            try:
                found[kind].append(run_metadata.parsed(datum.numpy.item()))
            except (ValueError, TypeError):  # damaged or of a later GradWatch: what we can read counts
                continue
    return found


def _alerts(said: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Those alerts of a text that are whole."""
    found: list[Mapping[str, Any]] = []
    for fields in (said or {}).get(key, ()):
        try:
            run_metadata.alert_of(fields)
        except (LookupError, TypeError, ValueError):
            continue
        found.append({**fields, "axis": fields.get("axis"), "closed_axis": fields.get("closed_axis")})
    return found
