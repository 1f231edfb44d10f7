"""Writes the record of a run: which numbers of a block go into the event file and how often, and its texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from time import monotonic, time

import numpy as np

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import Layout, Run
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.event_writer import EventWriter
from gradwatch.sinks.record.incident_spans import Key
from gradwatch.sinks.record.record_format import (
    EVENT_BYTES,
    NUMBERS,
    PARAMETERS,
    RecordColumns,
    RecordedBlock,
    Rows,
    changes_of,
    pack,
)
from gradwatch.sinks.run_summary import RunSummary

EXPECTED_STATISTICS = 24
"""Statistics besides the gradient norm that a model may have: as many as a model with every kind of layer."""

MIN_BYTES, BYTES_PER_SITE = 660, 2.2
"""Bytes a step, on average, that so many statistics add to the file at most: 660, or with more than 300 sites half of
the bytes of the gradient norms. A step of 300 layers then takes 2 kB at most, as docs/report.md states."""

ALERTS_SECONDS = 1.0
"""Seconds between two writes of the alerts, unless one is new or more severe: they may change at every block."""


def steps_between_rows(sites: int, parameters: int) -> int:
    """Steps between two rows of a statistic, at least, so that the file stays within these bytes."""
    together = 4 * (EXPECTED_STATISTICS * sites + parameters)
    return math.ceil(together / max(MIN_BYTES, BYTES_PER_SITE * sites))


class RecordWriter:
    """Writes the gradient norms and the whole-step numbers of every step. Other statistics, and the gradient norms of
    single parameters, are written once in n steps: the larger of `every_n_steps` and `steps_between_rows`. The zeros of
    gradients, which few samples measure, are always written: tables show those that were measured last.
    """

    def __init__(self, files: Iterable[EventWriter], every_n_steps: int, summary: RunSummary) -> None:
        """`summary`: of the run; each block is added to it, for the positions of its steps."""
        self._files = tuple(files)
        self._every_n_steps = every_n_steps
        self._session, self._began = time(), -1
        self._rows = 0
        """Rows in the file."""
        self._at, self._same = -1, 0
        """The x of the last event, and how many events right before it have the same."""
        self._latest_interval: dict[tuple[str, int], int] = {}
        """(statistic, optimizer) -> the last interval of n steps in which it was written."""
        self._axis = 0
        self._summary = summary
        self.alerts: dict[Key, Alert] = {}
        """All so far, in their present state."""
        self._alerts_changed = False
        self._alerts_written = -math.inf

    def open(self, run: Run) -> None:
        self._adopt(run.layout)
        self._write_text("meta", run_metadata.meta_text(run, self._session))

    def block(self, block: Block) -> None:
        """Write `block` and flush the files."""
        if block.layout is not self._layout:
            self._adopt(block.layout)
        if self._began < 0:
            self._began = int(block.steps[0])
        self._axis = int(block.axis[-1])
        self._summary.block(block)
        if self._files:
            self._write(block)
        if self._alerts_changed and monotonic() - self._alerts_written >= ALERTS_SECONDS:
            self._write_alerts()
        for file in self._files:
            file.flush()

    def alert(self, alert: Alert) -> None:
        known = self.alerts.get(alert.key)
        self.alerts[alert.key] = alert
        self._alerts_changed = True
        if known is None or known.severity is not alert.severity:
            self._write_alerts()

    def close(self, verdict: Verdict) -> None:
        before = dict(self.alerts)
        self.alerts |= {alert.key: alert for alert in verdict.incidents}
        if self._alerts_changed or self.alerts != before:
            self._write_alerts()
        self._write_text(
            "verdict", run_metadata.verdict_text(verdict, self._summary.positions.spans(verdict.incidents))
        )
        for file in self._files:
            file.flush(now=True)

    def _adopt(self, layout: Layout) -> None:
        self._layout, self._columns = layout, RecordColumns(layout)
        self._metadata = self._columns.about.metadata()
        self._interval = max(
            self._every_n_steps, steps_between_rows(len(self._columns.places), len(self._columns.parameters))
        )

    def _write(self, block: Block) -> None:
        columns, scalars = self._columns, block.scalars
        codes = block.codes[:, columns.places]
        changes = changes_of(codes, block.optimizers)
        recorded = RecordedBlock(
            columns.about,
            self._session,
            self._began,
            self._rows,
            block.axis,
            block.steps,
            block.optimizers,
            {name: scalars[name] for name in NUMBERS if name in scalars and not np.isnan(scalars[name]).all()},
            changes,
            codes[changes],
            columns.values(block, self._due(block)),
        )
        count = len(block.steps)
        self._rows += count
        events = min(count, -(-recorded.nbytes // EVENT_BYTES))
        bounds = [count * event // events for event in range(events + 1)]
        for first, end in pairwise(bounds):
            part = recorded if events == 1 else recorded.rows(first, end)
            strings, at = pack(part), int(part.axis[-1])
            self._same, self._at = (self._same + 1 if at == self._at else 0), at
            for file in self._files:
                file.strings(columns.tag(self._same), self._metadata, strings, at, shape=[len(strings)])

    def _due(self, block: Block) -> dict[str, Rows]:
        """Statistic -> the rows at which it is written."""
        measured = dict(block.measured)
        due: dict[str, Rows] = {}
        if "grad_norm" in measured and len(block.layout.parameters):
            measured[PARAMETERS] = measured["grad_norm"]
        for name in ("grad_norm", "zero_fraction"):
            if name in measured:
                due[name] = np.flatnonzero(measured.pop(name))
        intervals = (block.axis + 1) // self._interval
        optimizers = set(block.optimizers.tolist())
        newest = int(intervals[-1])
        for optimizer in sorted(optimizers):
            waiting = [name for name in measured if self._latest_interval.get((name, optimizer)) != newest]
            if not waiting:
                continue
            there = np.array([measured[name] for name in waiting]) & (block.optimizers == optimizer)
            for place in np.flatnonzero(there.any(axis=1)).tolist():
                statistic, rows = waiting[place], np.flatnonzero(there[place])
                now, before = intervals[rows], self._latest_interval.get((statistic, optimizer), -1)
                if now[-1] != before:
                    first = rows[now != np.concatenate([[before], now[:-1]])]
                    due[statistic] = np.union1d(due[statistic], first) if statistic in due else first
                    self._latest_interval[statistic, optimizer] = int(now[-1])
        return {statistic: rows for statistic, rows in due.items() if len(rows)}

    def _write_alerts(self) -> None:
        alerts = self.alerts.values()
        self._write_text("alerts", run_metadata.alerts_text(alerts, self._summary.positions.spans(alerts)))
        self._alerts_changed, self._alerts_written = False, monotonic()

    def _write_text(self, kind: run_metadata.Kind, text: str) -> None:
        for file in self._files:
            file.strings(run_metadata.tag(kind), run_metadata.metadata(kind), [text.encode()], self._axis, shape=[])
