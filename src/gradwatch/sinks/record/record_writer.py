"""The record of a run as it grows: what of each step goes into the event file, and when that reaches the disk."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.record import Record, Run
from gradwatch.sinks.headline_scalars import StepInterval
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.event_writer import EventWriter, Vector
from gradwatch.sinks.record.incident_spans import IncidentSpans
from gradwatch.sinks.record.record_format import PARAMETERS, Columns, whole
from gradwatch.sinks.record.size_budget import SizeBudget, vector

SECONDS = 0.5
"""What was written before that reaches the disk with the next records; those come a quarter of a second later, and
have waited a fifth for each other: a run that is killed loses one second (the project's promise)."""

SLOW = 0.8
"""Seconds after which a step comes late. Judgement."""

STEP = 140
"""Bytes that an event takes besides its vectors and scalars, with whole-step numbers (measured)."""

SPARE = 8
"""Vectors that there shall be room for before all headlines are written again. Judgement."""

REPEATED = 20
"""Records after which a headline is written again though it stands as it stood, where the file has no room for more: a
line between two equal points is as flat. Judgement."""


class RecordWriter:
    """Writes gradient norms and whole-step numbers of every record, other statistics every `every_n_steps` steps.

    The others wait where the file would grow faster than promised (`sinks.allowance`). The gradient norms of single
    parameters are one of them.
    """

    def __init__(self, files: Iterable[EventWriter], every_n_steps: int) -> None:
        self.files = tuple(files)
        self._interval = StepInterval(every_n_steps)
        self._codes: dict[int, NDArray[np.int8]] = {}
        self._allowance = SizeBudget()
        self._said: dict[str, tuple[float, int]] = {}
        self._records = 0
        self._axis = 0
        self._incidents = IncidentSpans()
        self._news = self._urgent = False
        self._texts: dict[run_metadata.Kind, str] = {}
        self._flushed = self._heard = time.monotonic()

    def open(self, run: Run) -> None:
        self._run, self._layout = run, run.layout
        self._columns = Columns(run.layout, run.labels)
        self._texts["meta"] = run_metadata.meta_text(run, time.time())

    def due(self, record: Record) -> list[str]:
        """The statistics whose turn it is; asked for once a record."""
        axis, interval, due = record.axis, self._interval, []
        for statistic in record.values:
            key = statistic, record.optimizer
            if interval.is_due(axis, key) and record.has(statistic) and interval.take_turn(axis, key):
                due.append(statistic)
        key = PARAMETERS, record.optimizer
        if len(record.layout.parameters) and interval.is_due(axis, key) and record.has("grad_norm"):
            due += [PARAMETERS] * interval.take_turn(axis, key)
        return due

    def record(self, record: Record, due: Sequence[str], scalars: Mapping[str, float]) -> None:
        """Write `record` with the statistics that are `due`, and `scalars`, by their tags."""
        if record.layout is not self._layout:
            self._layout, self._columns = record.layout, Columns(record.layout, self._run.labels)
        self._axis = record.axis
        self._incidents.advance(record.step, record.axis)
        self._records += 1
        sites = len(self._columns.places)
        if self.files:
            self._allowance.step(sites, self.files[0].written)
        scalars = self._lines(scalars, STEP + (1 + SPARE) * vector(sites))
        vectors = self._vectors(record, due, STEP + _size(scalars))
        if vectors or scalars or self._texts:
            self._tell(time.monotonic() - self._flushed >= SECONDS)
            numbers = whole(record) if "grad_norm" in vectors else None
            self._write(record.optimizer, scalars, vectors, numbers)

    def alert(self, alert: Alert) -> None:
        known = self._incidents.alerts.get((alert.rule, alert.step))
        self._urgent |= known is None or known.severity is not alert.severity
        self._news = True
        self._incidents.update(alert)

    def close(self, verdict: Verdict) -> None:
        before = dict(self._incidents.alerts)
        self._incidents.finish(verdict.incidents)
        self._news |= self._incidents.alerts != before
        self._tell(True)
        self._texts["verdict"] = run_metadata.verdict_text(verdict, self._incidents.spans)
        self._write(0, {}, {}, None)
        self._flush(time.monotonic())

    def _vectors(self, record: Record, due: Sequence[str], taken: float) -> dict[str, Vector]:
        """`taken`: bytes of this step's event that something else takes."""
        columns = self._columns
        always = "grad_norm"
        vectors: dict[str, Vector] = {}
        if record.has(always):
            vectors[always] = columns.kept(record.values[always])
        codes = record.codes[columns.places]
        if not np.array_equal(codes, self._codes.get(record.optimizer, ())):
            self._codes[record.optimizer] = vectors["missing"] = codes
        own = vector(len(columns.places))
        waiting = {statistic: own for statistic in due if statistic not in vectors}
        if PARAMETERS in waiting:
            waiting[PARAMETERS] = vector(len(record.layout.parameters))
        for statistic in self._allowance.chosen(waiting, taken + own * len(vectors)):
            if statistic == PARAMETERS:
                vectors[statistic] = columns.of_parameters(record)
            else:
                vectors[statistic] = columns.kept(record.values[statistic])
        return vectors

    def _lines(self, scalars: Mapping[str, float], beside: float) -> dict[str, float]:
        """Those of `scalars` that are written: where there is no room for all and `beside` bytes more, what is news."""
        written = dict(scalars)
        if not self._allowance.affords(_size(scalars) + beside):
            for tag, number in scalars.items():
                said, when = self._said.get(tag, (None, 0))
                if said == number and self._records - when < REPEATED:
                    del written[tag]
        self._said.update((tag, (number, self._records)) for tag, number in written.items())
        return written

    def _tell(self, all_of_it: bool) -> None:
        """Have the alerts written with the next event, where they are news."""
        if self._urgent or (self._news and all_of_it):
            self._texts["alerts"] = run_metadata.alerts_text(self._incidents.alerts.values(), self._incidents.spans)
            self._news = False

    def _write(
        self,
        optimizer: int,
        scalars: Mapping[str, float],
        vectors: Mapping[str, Vector],
        numbers: NDArray[np.float64] | None,
    ) -> None:
        now = time.monotonic()
        if now - self._flushed >= SECONDS:  # before anything is written: the writer is through, nobody waits for it
            self._flush(now)
        for file in self.files:
            file.write(
                self._axis, scalars, vectors, self._columns, optimizer=optimizer, whole=numbers, texts=self._texts
            )
        self._texts = {}
        # a step that comes late may be followed by one that comes as late, or by none
        if self._urgent or now - self._heard >= SLOW:
            self._flush(now)
            self._urgent = False
        self._heard = now

    def _flush(self, now: float) -> None:
        for file in self.files:
            file.flush()
        self._flushed = now


def _size(scalars: Mapping[str, float]) -> float:
    """Bytes that they take in an event: a tag, a number, and 9 around them."""
    return sum(len(tag) + 9 for tag in scalars)
