"""What goes out to the sinks, in order: to the patient ones some records at a time; one that fails is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.record import Record, Run
from gradwatch.sinks import Sink
from gradwatch.sinks.flight_recorder import FlightRecorder

BURST, LATE = 8, 0.2
"""Records that a patient sink gets together at most, fewer than fit into the queue of TensorBoard's writer; and seconds
by which it may get them late. Judgement."""


class Dispatcher:
    """Owns the sinks of a run."""

    def __init__(self, sinks: Sequence[Sink], *, dropped: Callable[[str, Exception], None]) -> None:
        """`dropped`: told the kind of a sink that failed, and how."""
        recorders = [sink for sink in sinks if isinstance(sink, FlightRecorder)]
        # one of the user's own beside the default one: the last is the one that was asked for
        self._sinks = [sink for sink in sinks if sink not in recorders[:-1]]
        self._dropped = dropped
        self.together = False
        """Whether the unhurried sinks wait with the patient ones, and all of them for `deliver`: somebody sees to it
        that none waits for long."""
        self._waiting: list[Record] = []
        """Records that those who wait have yet to get, or some of them where Ctrl-C came in between."""
        self._given: dict[int, int] = {}
        """How many of those a sink has got already."""
        self._delivered = monotonic()

    def __bool__(self) -> bool:
        return bool(self._sinks)

    @property
    def unhurried(self) -> bool:
        """Whether none of them minds that steps at which nothing happens are judged a little later."""
        return all(_patient(sink) or _unhurried(sink) for sink in self._sinks)

    def open(self, run: Run) -> None:
        self.deliver()
        self.to_all(lambda sink: sink.open(run))

    def record(self, record: Record) -> None:
        self.to_all(lambda sink: None if self._waits(sink) else sink.record(record))
        self._waiting.append(record)
        # by the clock, the first of several would go out alone, cold: a whole millisecond (measured)
        if not self.together and (len(self._waiting) >= BURST or monotonic() - self._delivered >= LATE):
            self.deliver()

    def alerts(self, alerts: Sequence[Alert]) -> None:
        self.deliver()
        for alert in alerts:
            self.to_all(partial(_tell, alert=alert))

    def close(self, verdict: Verdict) -> None:
        self.to_all(lambda sink: sink.close(verdict))

    def deliver(self) -> None:
        """Send those who wait what they have yet to get."""
        records, given, self._delivered = self._waiting, self._given, monotonic()

        def send(sink: Sink) -> None:
            if not self._waits(sink):
                return
            rest = records[given.get(id(sink), 0) :]
            # to ask whether it is a `Joining` takes 40 microseconds
            if rest and (record_all := getattr(sink, "record_all", None)) is not None:
                given[id(sink)] = len(records)
                record_all(rest)
                return
            for place, record in enumerate(rest, len(records) - len(rest)):
                given[id(sink)] = place + 1
                sink.record(record)

        if records:
            self.to_all(send)
            self._waiting, self._given = [], {}

    def to_all(self, send: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                send(sink)
            except Exception as error:
                self._sinks.remove(sink)
                self._dropped(type(sink).__name__, error)

    def _waits(self, sink: Sink) -> bool:
        return _patient(sink) or (self.together and _unhurried(sink))


def _patient(sink: Sink) -> bool:
    return getattr(sink, "patient", False) is True


def _unhurried(sink: Sink) -> bool:
    return getattr(sink, "unhurried", False) is True


def _tell(sink: Sink, alert: Alert) -> None:
    sink.alert(alert)
