"""A recorded run as arrays: every number of it, for those who compare or draw it themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.record import Layout, Missing, Record
from gradwatch.runs.outcome import Outcome
from gradwatch.runs.reader import read_run
from gradwatch.sinks.record.incident_spans import Key, Span

MAX_RECORDS = 20_000
"""Records of a statistic that are kept of a longer run, evenly thinned; with 300 layers 24 MB. Judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class StatisticSeries:
    """One statistic over the run, at the records that have it."""

    steps: NDArray[np.int64]
    """Optimizer steps before each record: shape [k]."""
    axis: NDArray[np.int64]
    """The same moments on the x-axis of the Trainer's logs."""
    optimizers: NDArray[np.int64]
    numbers: NDArray[np.float32]
    """Shape [k, sites], NaN where there is none, or where that was measured."""
    every: int
    """1, or n where only every n-th of a long run is here."""


@dataclass(frozen=True, slots=True, eq=False)
class RunArrays:
    """What a run has left on disk."""

    path: Path
    layout: Layout
    """The total and the layers."""
    values: Mapping[str, StatisticSeries]
    """By statistic; `grad_norm` is there at every step that was measured."""
    codes: NDArray[np.int8]
    """`Missing` of each number of `grad_norm`: shape [k, sites]."""
    scalars: Mapping[str, NDArray[np.float64]]
    """Numbers of the whole step, with `grad_norm`: `loss`, `overhead`, ...; shape [k], NaN where there is none."""
    alerts: tuple[Alert, ...]
    """Oldest first."""
    spans: Mapping[Key, Span]
    """Where each alert stands on the x-axis, by its rule and step."""
    verdict: Verdict
    ended: bool
    """Whether the run has written its verdict; otherwise it was cut off, or is still under way."""
    meta: Mapping[str, Any]
    """What ran, as `gradwatch.sinks.record.run_metadata` has it."""
    notes: tuple[str, ...]
    """What was wrong with the files, a sentence each."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sites; the first is the total."""
        return self.layout.names(range(len(self.layout)))


def read(path: Path | str, *, most: int = MAX_RECORDS, progress: Callable[[int, int], None] | None = None) -> RunArrays:
    """The run at `path`, a folder or an event file. `progress` as of `read_run`. Raises `files.Unreadable`."""
    outcome, rows = Outcome(), _ArrayBuilder(most)
    notes = read_run(Path(path), outcome, rows, progress=progress)
    gradients = rows.kept.get("grad_norm", _ThinnedRecords())
    sites = len(rows.layout)
    names = sorted({name for record in gradients.records for name in record.scalars})
    return RunArrays(
        path=Path(path),
        layout=rows.layout,
        values={name: kept.series(name, sites) for name, kept in rows.kept.items()},
        codes=_table([record.codes for record in gradients.records], sites, np.int8, int(Missing.NOT_SAMPLED)),
        scalars={
            name: np.array([record.scalars.get(name, np.nan) for record in gradients.records], np.float64)
            for name in names
        },
        alerts=tuple(sorted(outcome.alerts_by_key.values(), key=lambda alert: alert.step)),
        spans=outcome.spans,
        verdict=outcome.verdict,
        ended=outcome.finished is not None,
        meta=outcome.meta,
        notes=tuple(notes),
    )


class _ThinnedRecords:
    """Records that have a statistic: every `every`-th, so that they are no more than `most`."""

    def __init__(self, most: int = 2) -> None:
        self.records: list[Record] = []
        self._every, self._seen, self._most = 1, 0, max(2, most)

    def add(self, record: Record) -> None:
        if self._seen % self._every == 0:
            self.records.append(record)
        self._seen += 1
        if len(self.records) > self._most:
            self.records, self._every = self.records[::2], 2 * self._every

    def series(self, name: str, sites: int) -> StatisticSeries:
        heads = np.array([(r.step, r.axis, r.optimizer) for r in self.records], np.int64).reshape(-1, 3)
        numbers = _table([record.values[name] for record in self.records], sites, np.float32, np.nan)
        return StatisticSeries(heads[:, 0], heads[:, 1], heads[:, 2], numbers, self._every)


class _ArrayBuilder:
    """Collects the numbers of a recorded run."""

    def __init__(self, most: int) -> None:
        self.kept: dict[str, _ThinnedRecords] = {}
        self.layout = Layout(())
        self._most = most

    def opened(self, meta: Mapping[str, Any]) -> None:
        pass

    def alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        pass

    def ended(self, verdict: Mapping[str, Any]) -> None:
        pass

    def record(self, record: Record) -> None:
        self.layout = record.layout
        for name in record.values:
            self.kept.setdefault(name, _ThinnedRecords(self._most)).add(record)


def _table(rows: Sequence[NDArray[Any]], sites: int, dtype: Any, fill: float) -> NDArray[Any]:
    """Rows of at most `sites` numbers, one below the other: sites that came later have `fill` before."""
    table = np.full((len(rows), sites), fill, dtype=dtype)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table
