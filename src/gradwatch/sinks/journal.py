"""The record of a run as it grows: what of each step goes into the event file, and when that reaches the disk."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwatch.alert import Alert, Verdict
from gradwatch.record import Record, Run
from gradwatch.sinks import facts
from gradwatch.sinks.columns import Columns, whole
from gradwatch.sinks.event_file import EventFile, Vector
from gradwatch.sinks.headlines import MEASURED, Cadence
from gradwatch.sinks.incidents import Incidents

SECONDS = 1.0
"""How far the disk may be behind; a run that is killed loses no more (the project's promise)."""

BYTES_PER_SITE, BYTES_PER_STEP = 6.0, 150.0
"""What a step may add to the file on average: with 300 layers 1.96 kB, of which 1.43 kB are gradient norms and the
numbers of the whole step (the project's promise: 2 kB)."""

LEAST = 1900.0
"""Bytes that a step of a small model may add too: as much as 300 layers take. A vector of 9 layers takes 100, most of
them not for numbers, and 6 bytes a site would not pay for a second one."""

AHEAD = 50
"""Vectors that may be written before their turn: what is sampled at the start tells most. Judgement."""

VECTOR, STEP, SCALAR = 60, 140, 40
"""Bytes that a vector takes besides its numbers; an event besides its vectors, with whole-step numbers; and a scalar
(measured)."""


class Journal:
    """Writes gradient norms and whole-step numbers of every record, other statistics every `every_n_steps` steps.

    The others wait where the file would grow faster than promised (`BYTES_PER_SITE`).
    """

    def __init__(self, files: Iterable[EventFile], every_n_steps: int) -> None:
        self.files = tuple(files)
        self._cadence = Cadence(every_n_steps)
        self._codes: dict[int, NDArray[np.int8]] = {}
        self._room: float | None = None
        self._axis = 0
        self._incidents = Incidents()
        self._news = self._urgent = False
        self._texts: dict[facts.Kind, str] = {}
        self._flushed = self._heard = time.monotonic()

    def open(self, run: Run) -> None:
        self._run, self._layout = run, run.layout
        self._columns = Columns(run.layout, run.labels)
        self._texts["meta"] = facts.meta_text(run, time.time())

    def due(self, record: Record) -> list[str]:
        """The statistics whose turn it is; asked for once a record."""
        return [
            statistic
            for statistic in record.values
            if _measured(record, statistic) and self._cadence.due(record.axis, f"{statistic} {record.optimizer}")
        ]

    def record(self, record: Record, due: Sequence[str], scalars: Mapping[str, float]) -> None:
        """Write `record` with the statistics that are `due`, and `scalars`, by their tags."""
        if record.layout is not self._layout:
            self._layout, self._columns = record.layout, Columns(record.layout, self._run.labels)
        self._axis = record.axis
        self._incidents.at(record.step, record.axis)
        vectors = self._vectors(record, due, SCALAR * len(scalars))
        if vectors or scalars or self._texts:
            self._tell(time.monotonic() - self._flushed >= SECONDS)
            numbers = whole(record) if "grad_norm" in vectors else None
            self._write(record.optimizer, scalars, vectors, numbers)

    def alert(self, alert: Alert) -> None:
        known = self._incidents.alerts.get((alert.rule, alert.step))
        self._urgent |= known is None or known.severity is not alert.severity
        self._news = True
        self._incidents.hear(alert)

    def close(self, verdict: Verdict) -> None:
        before = dict(self._incidents.alerts)
        self._incidents.end(verdict.incidents)
        self._news |= self._incidents.alerts != before
        self._tell(True)
        self._texts["verdict"] = facts.verdict_text(verdict, self._incidents.spans)
        self._write(0, {}, {}, None)
        for file in self.files:
            file.flush()

    def _vectors(self, record: Record, due: Sequence[str], taken: float) -> dict[str, Vector]:
        """`taken`: bytes of this step's that something else takes."""
        columns = self._columns
        always = "grad_norm"
        vectors: dict[str, Vector] = {}
        if _measured(record, always):
            vectors[always] = columns.kept(record.values[always])
        codes = record.codes[columns.places]
        if not np.array_equal(codes, self._codes.get(record.optimizer, ())):
            self._codes[record.optimizer] = vectors["missing"] = codes
        size = 4 * len(columns.places) + VECTOR
        if self._room is None:
            self._room = float(AHEAD * size)
        allowed = max(LEAST, BYTES_PER_STEP + BYTES_PER_SITE * len(columns.places))
        self._room += allowed - STEP - size * len(vectors) - taken
        self._room = min(self._room, float(AHEAD * size))
        for statistic in due:
            if statistic not in vectors and self._room >= size:
                vectors[statistic] = columns.kept(record.values[statistic])
                self._room -= size
        return vectors

    def _tell(self, all_of_it: bool) -> None:
        """Have the alerts written with the next event, where they are news."""
        if self._urgent or (self._news and all_of_it):
            self._texts["alerts"] = facts.alerts_text(self._incidents.alerts.values(), self._incidents.spans)
            self._news = False

    def _write(
        self,
        optimizer: int,
        scalars: Mapping[str, float],
        vectors: Mapping[str, Vector],
        numbers: NDArray[np.float64] | None,
    ) -> None:
        for file in self.files:
            file.write(
                self._axis, scalars, vectors, self._columns, optimizer=optimizer, whole=numbers, texts=self._texts
            )
        self._texts = {}
        now = time.monotonic()
        # a step that comes late may be followed by one that comes as late, or by none
        if self._urgent or now - self._flushed >= SECONDS or now - self._heard >= SECONDS:
            for file in self.files:
                file.flush()
            self._flushed, self._urgent = now, False
        self._heard = now


def _measured(record: Record, statistic: str) -> bool:
    if statistic == "grad_norm":  # NaN may be what was measured
        return statistic in record.values and bool((record.codes == MEASURED).any())
    return not np.isnan(record.values[statistic]).all()
