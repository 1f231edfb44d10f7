"""Sends blocks and alerts to the sinks, in order, and drops a sink that fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import Run
from gradwatch.sinks import BlockSink, Sink
from gradwatch.sinks.flight_recorder import FlightRecorder
from gradwatch.sinks.run_summary import RunSummary


class Dispatcher:
    """Owns the sinks of a run."""

    def __init__(self, sinks: Sequence[Sink], *, dropped: Callable[[str, Exception], None]) -> None:
        """`dropped`: called with the class name of a sink that failed, and the error."""
        recorders = [sink for sink in sinks if isinstance(sink, FlightRecorder)]
        # the user's own follows the default one: only the last is used
        self._sinks = [sink for sink in sinks if sink not in recorders[:-1]]
        self._block_sinks = [sink for sink in self._sinks if isinstance(sink, BlockSink)]
        self._record_sinks = [sink for sink in self._sinks if not isinstance(sink, BlockSink)]
        self._dropped = dropped
        self._unsent: deque[tuple[Sink, Callable[[], None]]] = deque()
        """Calls that have not been made yet: a KeyboardInterrupt between them loses none and repeats none."""
        self._summary: RunSummary | None = None

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def open(self, run: Run) -> None:
        self._summary = self._summary or RunSummary()
        run = replace(run, summary=self._summary)
        self.to_all(lambda sink: sink.open(run))

    def block(self, block: Block) -> None:
        """Send finished rows."""
        self._unsent.extend([(sink, partial(sink.block, block)) for sink in self._block_sinks])
        records = block.records() if self._record_sinks else ()
        for sink in self._record_sinks:
            self._unsent.extend((sink, partial(sink.record, record)) for record in records)
        self._send()

    def alerts(self, alerts: Sequence[Alert]) -> None:
        self._unsent.extend((sink, partial(sink.alert, alert)) for alert in alerts for sink in self._sinks)
        self._send()

    def close(self, verdict: Verdict) -> None:
        self._summary = None
        self.to_all(lambda sink: sink.close(verdict))

    def to_all(self, send: Callable[[Sink], None]) -> None:
        """Call `send` with each sink, after the calls that have not been made yet."""
        self._unsent.extend((sink, partial(send, sink)) for sink in self._sinks)
        self._send()

    def _send(self) -> None:
        while self._unsent:
            sink, send = self._unsent.popleft()
            try:
                send()
            except Exception as error:
                # by identity: two sinks may be equal
                self._sinks = [other for other in self._sinks if other is not sink]
                self._block_sinks = [other for other in self._block_sinks if other is not sink]
                self._record_sinks = [other for other in self._record_sinks if other is not sink]
                self._unsent = deque((other, call) for other, call in self._unsent if other is not sink)
                self._dropped(type(sink).__name__, error)
