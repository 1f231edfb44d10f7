"""The texts of a run: metadata, alerts and verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwatch.core.alert import serious
from gradwatch.core.typed_values import InvalidError
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.limits import string_of
from gradwatch.sinks.record.outcome import Outcome, end_of
from gradwatch.tensorboard_plugin.record_data import RecordCache, RunRecord, nearest
from gradwatch.tensorboard_plugin.runs import RunTags, TensorBoardData

KINDS: tuple[run_metadata.Kind, ...] = ("meta", "alerts", "verdict")


def outcome_of(
    source: TensorBoardData, cache: RecordCache, run: str, listing: RunTags, record: RunRecord | None = None
) -> Outcome:
    """What the texts of a run say together, and its `record`.

    Without a `record` it is read only where the texts are of several sessions: it knows where each began.
    """
    texts = _texts(source, run, listing)
    started = max((fields["started"] for _, kind, fields in texts if kind == "meta"), default=0.0)
    if record is None and any(written < started for written, kind, _ in texts if kind != "meta"):
        record = cache.record(source, run, listing)
    outcome, sessions = Outcome(), record.sessions if record else {}
    for written, kind, fields in texts:
        outcome.add_text(kind, fields, end=end_of(written, sessions))
    if record is not None:
        outcome.steps, outcome.extent = record.steps, record.extent
        outcome.layers = len(record.names) - len(record.totals)
        outcome.losses = record.losses
    return outcome


def alerts_of(outcome: Outcome) -> list[dict[str, Any]]:
    """The alerts as the page gets them, worst first."""
    return [run_metadata.fields_of(alert, outcome.spans) for alert in outcome.verdict.incidents]


def onsets_of(outcome: Outcome, names: Sequence[str]) -> dict[int, int]:
    """Place among `names` -> the first step of the x-axis at which a warning or an error is about that layer or one of
    its parameters; origins come first, and of those the worst.
    """
    places = {name: place for place, name in enumerate(names)}
    alerts = serious(outcome.alerts.values())
    found: dict[int, int] = {}
    for alert, site in [(each, each.layer) for each in alerts] + [
        (each, site) for each in alerts for site in each.sites
    ]:
        if layer := nearest(site, places):
            begin = outcome.spans[alert.key].begin
            began = alert.step if begin is None else begin
            found[places[layer]] = min(began, found.get(places[layer], began))
    return found


def _texts(source: TensorBoardData, run: str, listing: RunTags) -> list[tuple[float, str, dict[str, Any]]]:
    """When each text was written, in seconds since 1970, its kind and what it says; oldest first."""
    tags = {kind: run_metadata.tag(kind) for kind in KINDS if kind in listing.texts}
    data = source.read(run, list(tags.values())) if tags else {}
    found = []
    for kind, tag in tags.items():
        for datum in data.get(tag, ()):
            try:
                text = string_of(datum.numpy.ravel().tolist())
                found.append((datum.wall_time, kind, run_metadata.read_text(kind, text)))
            except InvalidError:  # damaged or of another GradWatch: what can be read counts
                continue
    return sorted(found, key=lambda text: text[0])
