"""Where records and alerts go by default."""

from __future__ import annotations

from gradwatch.sinks import Sink


def default_sinks(*, keep_batch: bool = False) -> tuple[Sink, ...]:
    """A new tuple of the default sinks: log, console, scalars for every logger of the Trainer, TensorBoard if one of
    them is a TensorBoardLogger, otherwise a recorder, the report, and the flight recorder.

    `keep_batch`: whether the flight recorder stores the failing batch.
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
