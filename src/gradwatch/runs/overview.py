"""A recorded run in one line, read without decoding its numbers, so that listing many runs is fast."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from gradwatch.core.alert import Severity
from gradwatch.runs.files import RECORD_MARK, Unreadable, files_of
from gradwatch.runs.outcome import Outcome
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.tfrecord import Damaged, frames

TEXT_MARK = run_metadata.PREFIX.encode()


@dataclass(frozen=True, slots=True)
class RunOverview:
    """What a list says of a run."""

    steps: int
    """Records in all its files."""
    state: str
    """The worst severity, or "healthy"."""
    faults: tuple[str, ...]
    """The rules of its alerts but for notices, worst first."""
    began: str
    ended: bool


def overview(path: Path) -> RunOverview:
    """Raises Unreadable where there is no record at `path`."""
    from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]

    outcome, steps, first = Outcome(), 0, 0.0
    for place in files_of(path):
        with open(place, "rb", buffering=1 << 20) as file:
            try:
                for data in frames(file):
                    if data is None:
                        continue
                    steps += RECORD_MARK in data
                    if TEXT_MARK in data or not first:
                        event = event_pb2.Event.FromString(data)
                        first = first or event.wall_time
                        _read_texts(event, outcome)
            except Damaged:
                continue  # up to there it counts; `gradwatch report` says so
    if not steps:
        raise Unreadable(f"{path} holds no whole step")
    incidents = outcome.verdict.incidents
    worst = max((alert.severity for alert in incidents), key=lambda severity: severity.order, default=None)
    loud = tuple(dict.fromkeys(alert.rule for alert in incidents if alert.severity is not Severity.NOTICE))
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(first))
    return RunOverview(steps, worst.value if worst else "healthy", loud, began, outcome.finished is not None)


def _read_texts(event: object, outcome: Outcome) -> None:
    for value in event.summary.value:  # type: ignore[attr-defined]
        if not value.tag.startswith(run_metadata.PREFIX):
            continue
        try:
            fields = run_metadata.parsed(value.tensor.string_val[0])
            if value.tag == run_metadata.tag("meta"):
                outcome.opened(fields)
            elif value.tag == run_metadata.tag("alerts"):
                outcome.alerts(fields["alerts"])
            elif value.tag == run_metadata.tag("verdict"):
                outcome.ended(fields)
        except (ValueError, LookupError, TypeError):
            continue  # of another version
