"""What a report tells of a run, gathered as the run goes on or is replayed, in memory that does not grow with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.record import Floats, Layout, Missing, Record
from gradwatch.runs.outcome import Outcome
from gradwatch.runs.report.downsampled_columns import Pool
from gradwatch.sinks.downsampling import Downsampling
from gradwatch.sinks.record.incident_spans import Key, Span

PICTURED = ("grad_norm", "signal_rms", "signal_norm", "update_ratio")
"""Statistics that are drawn, layer by step."""

MEASURED = int(Missing.MEASURED)


class RunData:
    """Collects records, and at the end the alerts; rows are the total, the layers and the tapped tensors."""

    def __init__(self) -> None:
        self.meta: Mapping[str, Any] = {}
        self.verdict = Verdict((), 0, 0, 0.0, {})
        self.spans: Mapping[Key, Span] = {}
        self.ended = False
        self.notes: tuple[str, ...] = ()
        self.layout = Layout(())
        self.pools = {name: Pool() for name in PICTURED}
        self.loss = Pool(log=False)
        self.records = 0
        self.digest = Downsampling(0)
        self.zeros: Floats = np.empty(0)
        self.codes: NDArray[np.int8] = np.empty(0, dtype=np.int8)
        self._places: NDArray[np.intp] = np.empty(0, dtype=np.intp)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the rows."""
        return self.layout.names(self._places)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.layout.sites[int(place)].module for place in self._places)

    def adopt(self, layout: Layout) -> None:
        """Go on with `layout`, which begins with the sites of the present one."""
        self.layout = layout
        self._places = np.sort(np.concatenate([[0], layout.layers, layout.taps]).astype(np.intp))
        rows = len(self._places)
        self.digest.grow(rows)
        self.zeros = np.pad(self.zeros, (0, rows - len(self.zeros)), constant_values=np.nan)
        self.codes = np.pad(self.codes, (0, rows - len(self.codes)), constant_values=int(Missing.NOT_SAMPLED))

    def record(self, record: Record) -> None:
        if record.layout is not self.layout:
            self.adopt(record.layout)
        self.records += 1
        places, codes = self._places, record.codes[self._places]
        for name, pool in self.pools.items():
            if name not in record.values or (name != "grad_norm" and not record.has(name)):
                continue
            numbers = record.values[name][places]
            if name == "grad_norm":
                measured = codes == MEASURED
                pool.add(record.axis, numbers, measured)
                self.digest.add(numbers, measured)
                self.codes = codes
            else:
                pool.add(record.axis, numbers)
        if record.has("zero_fraction"):
            zeros = record.values["zero_fraction"][places]
            np.copyto(self.zeros, zeros, where=~np.isnan(zeros))
        if "loss" in record.scalars:
            self.loss.add(record.axis, np.array([record.scalars["loss"]]), np.array([True]))

    def end(self, verdict: Verdict, spans: Mapping[Key, Span], *, ended: bool = True) -> None:
        """`ended`: whether the run was, or only its record."""
        self.verdict, self.spans, self.ended = verdict, spans, ended

    def alerts_by_row(self) -> dict[int, list[Alert]]:
        """Row -> the incidents that concern it, worst first; those of a parameter are its layer's."""
        rows = {int(place): row for row, place in enumerate(self._places)}
        by_name = {self.layout.sites[place].name: row for place, row in rows.items() if row}
        found: dict[int, list[Alert]] = {}
        for alert in self.verdict.incidents:
            places = (self._row(site, by_name, rows) for site in alert.sites or (alert.layer,))
            for row in dict.fromkeys(row for row in places if row is not None):
                found.setdefault(row, []).append(alert)
        return found

    def _row(self, site: str, by_name: Mapping[str, int], rows: Mapping[int, int]) -> int | None:
        place = self.layout.index.get(site)
        if site in by_name or place is None:
            # in a replay, parameters are not in the layout: the layer's name is what comes before the last dot
            return by_name.get(site, by_name.get(site.rpartition(".")[0]))
        return rows.get(self.layout.sites[place].layer)


class Replayed:
    """Collects the data of a report from a recorded run."""

    def __init__(self) -> None:
        self._story, self._outcome = RunData(), Outcome()

    def opened(self, meta: Mapping[str, Any]) -> None:
        self._outcome.opened(meta)

    def record(self, record: Record) -> None:
        self._story.record(record)
        self._outcome.record(record)

    def alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        self._outcome.alerts(alerts)

    def ended(self, verdict: Mapping[str, Any]) -> None:
        self._outcome.ended(verdict)

    def data(self, notes: Sequence[str] = ()) -> RunData:
        """`notes`: what was wrong with the files."""
        outcome, data = self._outcome, self._story
        data.end(outcome.verdict, outcome.spans, ended=outcome.finished is not None)
        finished = {} if outcome.finished is None else {"finished": outcome.finished}
        data.meta, data.notes = {**outcome.meta, **finished}, tuple(notes)
        return data
