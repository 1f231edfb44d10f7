"""Where records and alerts go by default."""

from __future__ import annotations

from gradwatch.sinks import Sink


def default_sinks(*, keep_batch: bool = False) -> tuple[Sink, ...]:
    """Log, console, every logger of the Trainer, TensorBoard where there is one, a recorder where not, the report, and
    the flight recorder; `keep_batch`: whether that keeps the failing batch, too.
    """
    from gradwatch.runs.report.sink import Report
    from gradwatch.sinks.flight_recorder import FlightRecorder
    from gradwatch.sinks.log import Log
    from gradwatch.sinks.record.recorder import Recorder
    from gradwatch.sinks.scalars import Scalars
    from gradwatch.sinks.tensorboard.sink import TensorBoard
    from gradwatch.sinks.terminal.console import Console

    return (
        Log(verdict="brief"),
        Console(),
        Scalars(),
        TensorBoard(),
        Recorder(),
        Report(),
        FlightRecorder(keep_batch=keep_batch),
    )
