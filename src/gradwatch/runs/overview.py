"""A recorded run in one line, read without decoding its numbers, so that listing many runs is fast."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradwatch.core.alert import Severity
from gradwatch.runs.files import RECORD_MARK, Unreadable, files_of
from gradwatch.runs.outcome import Outcome
from gradwatch.runs.reader import NOBODYS, session_ends
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.record_format import RECORD_TAG_PREFIX, about_block
from gradwatch.sinks.record.tfrecord import Damaged, frames

TEXT_MARK = run_metadata.RUN_TAG_PREFIX.encode()


@dataclass(frozen=True, slots=True)
class RunOverview:
    """What a list says of a run."""

    steps: int
    """Those that are recorded."""
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
    files = files_of(path)
    for place, end in zip(files, session_ends(files), strict=True):
        with open(place, "rb", buffering=1 << 20) as file:
            try:
                for data in frames(file):
                    if data is None or not (TEXT_MARK in data or RECORD_MARK in data):
                        continue
                    event = event_pb2.Event.FromString(data)
                    first = first or event.wall_time
                    for value in event.summary.value:
                        steps += _read(value.tag, value.tensor.string_val, outcome, end)
            except Damaged:
                continue  # up to there it counts; `gradwatch report` says so
    if not steps:
        raise Unreadable(f"{path} holds no whole step")
    incidents = outcome.verdict.incidents
    worst = max((alert.severity for alert in incidents), key=lambda severity: severity.order, default=None)
    loud = tuple(dict.fromkeys(alert.rule for alert in incidents if alert.severity is not Severity.NOTICE))
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(first))
    return RunOverview(steps, worst.value if worst else "healthy", loud, began, outcome.finished is not None)


def _read(tag: str, strings: Sequence[bytes], outcome: Outcome, end: float) -> int:
    """Returns the steps before `end`, where a later session begins, of a value in an event; `outcome` gets its text."""
    try:
        if tag.startswith(RECORD_TAG_PREFIX):
            _, steps = about_block(strings)
            return int(np.count_nonzero(steps < end))
        if tag.startswith(run_metadata.RUN_TAG_PREFIX):
            fields = run_metadata.parsed(strings[0])
            if tag == run_metadata.tag("meta"):
                outcome.opened(fields)
            elif tag == run_metadata.tag("alerts"):
                outcome.alerts([alert for alert in fields["alerts"] if alert["step"] < end])
            elif tag == run_metadata.tag("verdict"):
                outcome.ended(fields)
    except NOBODYS:
        return 0  # `gradwatch report` says so
    return 0
