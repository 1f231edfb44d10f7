"""A recorded run in one line, read without a matrix of its numbers, so that listing many runs is fast."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from gradwatch.core.alert import Severity
from gradwatch.runs.outcome import Outcome
from gradwatch.runs.reader import RecordedRun, RecordedText, give_text


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
    run, outcome, steps = RecordedRun(path), Outcome(), 0
    for part in run.parts():
        if isinstance(part, RecordedText):
            give_text(part, outcome)
        else:
            steps += len(part.block)
    incidents = outcome.verdict.incidents
    worst = max((alert.severity for alert in incidents), key=lambda severity: severity.order, default=None)
    loud = tuple(dict.fromkeys(alert.rule for alert in incidents if alert.severity is not Severity.NOTICE))
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.began))
    return RunOverview(steps, worst.value if worst else "healthy", loud, began, outcome.finished is not None)
