"""Sinks: where records and alerts go. The contract; each sink is a file beside this one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import Record, Run


class AnySink(Protocol):
    """What all sinks have. A sink is told everything on rank 0, in order. What it raises is reported once, and the sink
    is dropped.
    """

    def open(self, run: Run) -> None:
        """Called at the start of every fit, before the first record; again when parameters were adopted."""

    def alert(self, alert: Alert) -> None:
        """An incident was opened, has grown (no `closed_step` yet) or was closed; `rule` and `step` tell which one.

        It may come before the record of its last step: where a step looks odd, it is judged before the optimizer moves.
        """

    def close(self, verdict: Verdict) -> None:
        """The fit is over, well or badly; called once per `open`ed fit."""


@runtime_checkable
class BlockSink(AnySink, Protocol):
    """A sink that gets consecutive optimizer steps together: a training that it asks may be some steps ahead."""

    def block(self, block: Block) -> None:
        """Optimizer steps, complete: after clipping and the update."""


class RecordSink(AnySink, Protocol):
    """A sink that gets the records of a block one by one."""

    def record(self, record: Record) -> None:
        """One optimizer step, complete: after clipping and the update."""


Sink = BlockSink | RecordSink
"""One that has both `block` and `record` gets blocks."""
