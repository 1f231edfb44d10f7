"""Sinks: where records and alerts go. The contract; the smallest sink is `memory.py`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import Record, Run


class AnySink(Protocol):
    """The methods that all sinks have, called in order, on rank 0; of `Scalars` and `FlightRecorder` on every rank. If
    one raises, the error is reported once and the sink is dropped.
    """

    def open(self, run: Run) -> None:
        """Called at the start of every fit, before the first record, and again when parameters are added."""

    def alert(self, alert: Alert) -> None:
        """An incident was opened, has grown (no `closed_step` yet) or was closed. `alert.key` says which.

        It may come before the record of its step: a step that looks odd is judged before the optimizer steps.
        """

    def close(self, verdict: Verdict) -> None:
        """The fit has ended, also by an exception; called once for each fit that was opened."""


@runtime_checkable
class BlockSink(AnySink, Protocol):
    """A sink that gets consecutive optimizer steps together; the training may be some steps ahead of them."""

    def block(self, block: Block) -> None:
        """Optimizer steps, complete: after clipping and the update."""


class RecordSink(AnySink, Protocol):
    """A sink that gets the records of a block one by one."""

    def record(self, record: Record) -> None:
        """One optimizer step, complete: after clipping and the update."""


Sink = BlockSink | RecordSink
"""A sink with both `block` and `record` gets blocks."""
