"""Sinks: where records and alerts go. The contract; each sink is a file beside this one."""

from __future__ import annotations

from typing import Protocol

from gradwatch.alert import Alert, Verdict
from gradwatch.record import Record, Run


class Sink(Protocol):
    """Gets everything on rank 0, in order. What it raises is reported once, and the sink is dropped."""

    def open(self, run: Run) -> None:
        """Called at the start of every fit, before the first record; again when parameters were adopted."""

    def record(self, record: Record) -> None:
        """One optimizer step, complete: after clipping and the update."""

    def alert(self, alert: Alert) -> None:
        """An incident was opened, has grown (no `closed_step` yet) or was closed; `rule` and `step` tell which one."""

    def close(self, verdict: Verdict) -> None:
        """The fit is over, well or badly; called once per `open`ed fit."""


def default_sinks(*, keep_batch: bool = False) -> tuple[Sink, ...]:
    """Log, console, every logger of the Trainer, TensorBoard where there is one, the flight recorder.

    `keep_batch`: whether the flight recorder keeps the failing batch, too.
    """
    from gradwatch.sinks.console import Console
    from gradwatch.sinks.flight_recorder import FlightRecorder
    from gradwatch.sinks.log import Log
    from gradwatch.sinks.scalars import Scalars
    from gradwatch.sinks.tensorboard import TensorBoard

    return Log(), Console(), Scalars(), TensorBoard(), FlightRecorder(keep_batch=keep_batch)
