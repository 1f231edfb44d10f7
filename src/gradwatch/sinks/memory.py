"""Keeps everything a run says in plain lists: for tests and notebooks."""

from __future__ import annotations

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.record import Record, Run


class Memory:
    """`records`, `alerts` (an entry for the opening, each growth and the end of each), the last `run` and `verdict`."""

    def __init__(self, *, limit: int | None = None) -> None:
        """`limit`: records kept, the newest; None keeps all."""
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise TypeError(f"limit={limit!r}: give a number of records, or None to keep all")
        if limit is not None and limit < 1:
            raise ValueError(f"limit={limit}: give 1 or more, or None to keep all")
        self.limit = limit
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
