"""Reports fits and alerts to the process that started this one, `gradwatch run`, as lines of a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwatch.core.alert import Alert, Severity, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import Run

REPORT_VARIABLE = "GRADWATCH_PROCESS_REPORT"
"""Environment variable: the file to which every process of the run appends lines."""


@dataclass(frozen=True, slots=True)
class ProcessSummary:
    """What the processes of a run have reported."""

    trainers: int
    """Number of Trainers made."""
    failure: str
    """Why the last of the Trainers that got no GradWatch got none; empty where each got one."""
    fits: int
    """Number of fits watched."""
    alerts: tuple[Severity, ...]
    """The highest severity of each incident; no notices."""

    def at_least(self, severity: Severity) -> int:
        return sum(each.order >= severity.order for each in self.alerts)


class ProcessReport:
    """Appends a line at the start of each fit and for each alert, so that a killed process leaves its lines."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._opened = False

    def open(self, run: Run) -> None:
        if not self._opened:
            append_line(self._path, fit=run.description)
        self._opened = True

    def block(self, block: Block) -> None:
        pass

    def alert(self, alert: Alert) -> None:
        if alert.severity is not Severity.NOTICE:
            append_line(self._path, rule=str(alert.rule), step=int(alert.step), severity=alert.severity.value)

    def close(self, verdict: Verdict) -> None:
        self._opened = False
        for alert in verdict.incidents:  # a resumed run does not announce the incidents of its checkpoint
            self.alert(alert)


def requested_reports() -> tuple[ProcessReport, ...]:
    """The report, if the environment asks for one."""
    path = os.environ.get(REPORT_VARIABLE)
    return (ProcessReport(path),) if path else ()


def append_line(path: Path, **fields: Any) -> None:
    """Append one line in one write, so that lines of several processes do not mix. Raises OSError."""
    line = json.dumps({"process": os.getpid(), **fields}) + "\n"
    with open(path, "ab", buffering=0) as file:
        file.write(line.encode())


def summarize(path: Path) -> ProcessSummary:
    """Read the lines of all processes; an incomplete line is left out. Raises OSError."""
    trainers, failure = 0, ""
    fits: dict[int, int] = {}
    worst: dict[tuple[int, int, str, int], Severity] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        process = int(line["process"])
        if "trainer" in line:
            trainers += 1
        elif "failure" in line:
            failure = str(line["failure"])
        elif "fit" in line:
            fits[process] = fits.get(process, 0) + 1
        elif "severity" in line:
            key = process, fits.get(process, 0), line["rule"], line["step"]
            worst[key] = max(worst.get(key, Severity.NOTICE), Severity(line["severity"]), key=lambda s: s.order)
    return ProcessSummary(trainers, failure, sum(fits.values()), tuple(worst.values()))
