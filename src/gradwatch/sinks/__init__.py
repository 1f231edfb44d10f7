"""Sinks: where records and alerts go. The contract; each sink is a file beside this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.record import Record, Run


class Sink(Protocol):
    """Gets everything on rank 0, in order. What it raises is reported once, and the sink is dropped.

    A sink with `patient = True` gets its records some at a time, before anything else that it is told and at most 0.2
    seconds late while the training steps: code that runs several times in a row costs a third of what it costs once a
    step, when the training has pushed it out of the caches (measured).

    Where every sink is patient or has `unhurried = True`, steps at which nothing looks odd are judged as late, and
    their records are there then, of several steps together; where somebody waits for each step, an unhurried sink gets
    each at once. What such a sink asks the training while it is told of a step may be some steps ahead of that.
    """

    def open(self, run: Run) -> None:
        """Called at the start of every fit, before the first record; again when parameters were adopted."""

    def record(self, record: Record) -> None:
        """One optimizer step, complete: after clipping and the update."""

    def alert(self, alert: Alert) -> None:
        """An incident was opened, has grown (no `closed_step` yet) or was closed; `rule` and `step` tell which one."""

    def close(self, verdict: Verdict) -> None:
        """The fit is over, well or badly; called once per `open`ed fit."""


class Joining(Protocol):
    """A sink that would rather have the records that it gets together in one call."""

    def record_all(self, records: Sequence[Record]) -> None:
        """Some in a row, one at least, instead of `record` for each."""
