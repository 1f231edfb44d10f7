"""Keeps records and alerts in lists, for tests and notebooks."""

from __future__ import annotations

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.arguments import check_whole
from gradwatch.core.record import Record, Run


class Memory:
    """`records`, `alerts` (an entry for the opening, each growth and the end of each), the last `run` and `verdict`."""

    def __init__(self, *, limit: int | None = None) -> None:
        """`limit`: records kept, the newest; None keeps all."""
        expected = "a number of records of at least 1, or None to keep all"
        self.limit = None if limit is None else check_whole("limit", limit, expected)
        self.run: Run | None = None
        self.records: list[Record] = []
        self.alerts: list[Alert] = []
        self.verdict: Verdict | None = None

    def open(self, run: Run) -> None:
        self.run = run

    def record(self, record: Record) -> None:
        self.records.append(record)
        if self.limit is not None:
            del self.records[: -self.limit]

    def alert(self, alert: Alert) -> None:
        self.alerts.append(alert)

    def close(self, verdict: Verdict) -> None:
        self.verdict = verdict
