"""Headline scalars, the canonical record and the table of alerts, for TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gradwatch.alert import Alert, Verdict, listing
from gradwatch.record import Record, Run
from gradwatch.sinks.columns import Columns
from gradwatch.sinks.event_file import EventFile, Vector
from gradwatch.sinks.headlines import GROUP, MEASURED, STATISTICS, Cadence, checked_interval, headlines, is_tensorboards


@runtime_checkable
class ScalarWriter(Protocol):
    """Anything that takes scalars."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...


class TensorBoard:
    """Writes where the Trainer's TensorBoard loggers do, or to `writer`.

    The gradient norms of every record; headline scalars, and other statistics as they are measured, every
    `every_n_steps` steps (None: the Trainer's `log_every_n_steps`). A `writer` other than torch's SummaryWriter gets
    the scalars only.
    """

    def __init__(self, *, writer: ScalarWriter | None = None, every_n_steps: int | None = None) -> None:
        if writer is not None and not isinstance(writer, ScalarWriter):
            raise TypeError(
                f"writer={writer!r}: give a SummaryWriter (a TensorBoardLogger's `.experiment`), another object with "
                "add_scalar(tag, value, step), or None for the Trainer's own loggers"
            )
        self.writer = writer
        self.every_n_steps = checked_interval(every_n_steps)
        self._run: Run | None = None
        self._files: list[EventFile] = []
        self._plain: list[ScalarWriter] = []
        self._alerts: dict[tuple[str, int], Alert] = {}
        self._axis = 0

    def open(self, run: Run) -> None:
        if self._run is None:
            writers = _writers(run) if self.writer is None else [self.writer]
            self._files = [EventFile(writer) for writer in writers if _is_torchs(writer)]
            self._plain = [writer for writer in writers if not _is_torchs(writer)]
            self._alerts = {}
            self._cadence = Cadence(self.every_n_steps or run.log_every_n_steps)
            self._codes: NDArray[np.int8] = np.empty(0, dtype=np.int8)
        self._run = run
        self._columns = Columns(run.layout, run.labels)
        self._layout = run.layout

    def record(self, record: Record) -> None:
        if self._run is None or not (self._files or self._plain):
            return
        if record.layout is not self._layout:
            self._columns = Columns(record.layout, self._run.labels)
            self._layout = record.layout
        self._axis = record.axis
        due = self._due(record)
        numbers = headlines(record, self._alerts.values()) if not STATISTICS.isdisjoint(due) else {}
        for writer in self._plain:
            for tag, number in numbers.items():
                writer.add_scalar(tag, number, record.axis)
        vectors = self._vectors(record, due) if self._files else {}
        for file in self._files if vectors or numbers else ():
            file.write(record.axis, numbers, vectors, self._columns)

    def alert(self, alert: Alert) -> None:
        self._alerts[alert.rule, alert.step] = alert
        self._write_alerts()

    def close(self, verdict: Verdict) -> None:
        final = {(alert.rule, alert.step): alert for alert in verdict.incidents}
        if final and final != self._alerts:
            self._alerts |= final
            self._write_alerts()
        for file in self._files:
            file.flush()
        self._run = None

    def _due(self, record: Record) -> list[str]:
        """The statistics whose turn it is."""
        return [
            statistic
            for statistic in record.values
            if _measured(record, statistic) and self._cadence.due(record.axis, f"{statistic} {record.optimizer}")
        ]

    def _vectors(self, record: Record, due: list[str]) -> dict[str, Vector]:
        always = [name for name in ("grad_norm",) if name not in due and _measured(record, name)]
        vectors: dict[str, Vector] = {name: self._columns.kept(record.values[name]) for name in (*always, *due)}
        codes = record.codes[self._columns.places]
        if not np.array_equal(codes, self._codes):
            self._codes = vectors["missing"] = codes
        return vectors

    def _write_alerts(self) -> None:
        """The whole table each time: TensorBoard shows the latest text of a tag."""
        table = alerts_table(self._alerts.values())
        for file in self._files:
            file.text(f"{GROUP}alerts", table, self._axis)


def _measured(record: Record, statistic: str) -> bool:
    if statistic == "grad_norm":  # NaN may be what was measured
        return statistic in record.values and bool((record.codes == MEASURED).any())
    return not np.isnan(record.values[statistic]).all()


def alerts_table(alerts: Iterable[Alert]) -> str:
    """Markdown, oldest first."""
    lines = ["| since step | until | severity | fault | layers | evidence | try |", "|---|---|---|---|---|---|---|"]
    for alert in sorted(alerts, key=lambda alert: alert.step):
        until = "open" if alert.closed_step is None else str(alert.closed_step)
        texts = (str(alert.severity), alert.rule, listing(alert.sites or (alert.layer,)), alert.message, alert.remedy)
        cells = [str(alert.step), until, *map(escaped, texts)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def escaped(text: str) -> str:
    """`text` as one line of Markdown that means nothing but itself, also within a table and to HTML."""
    marked = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _writers(run: Run) -> list[ScalarWriter]:
    return [logger.experiment for logger in run.loggers if is_tensorboards(logger)]  # type: ignore[attr-defined]


def _is_torchs(writer: object) -> bool:
    return any(
        parent.__name__ == "SummaryWriter" and parent.__module__.startswith("torch.") for parent in type(writer).__mro__
    )
