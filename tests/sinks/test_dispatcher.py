"""What goes out to the sinks: in order, by block or one by one, and never to one that failed."""

from __future__ import annotations

from typing import Any

import pytest

from gradwatch.core.alert import Alert, Severity, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import Layout, Record, Run
from gradwatch.sinks.dispatcher import Dispatcher
from synthetic_records import block_of, record_at

VERDICT = Verdict((), 0, 0, 0.0, {})
LAYOUT = Layout(())


class Received:
    """Remembers all that it is given."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def open(self, run: Run) -> None:
        self.received.append("open")

    def alert(self, alert: Alert) -> None:
        self.received.append(alert.rule)

    def close(self, verdict: Verdict) -> None:
        self.received.append("close")


class OneByOne(Received):
    def record(self, record: Record) -> None:
        self.received.append(record.step)


class ByBlock(Received):
    def block(self, block: Block) -> None:
        self.received.append(block.steps.tolist())


class Failing(OneByOne):
    def record(self, record: Record) -> None:
        raise ZeroDivisionError(f"at {record.step}")


def record(step: int, layout: Layout = LAYOUT) -> Record:
    return record_at(step, layout, {})


def block(*steps: int) -> Block:
    return block_of([record(step) for step in steps])


def alert(rule: str) -> Alert:
    return Alert(rule, Severity.WARNING, "a", ("a",), 0, 0, 1.0, 1.0, "message", "remedy")


def box(*sinks: Any) -> tuple[Dispatcher, list[str]]:
    dropped: list[str] = []
    return Dispatcher(sinks, dropped=lambda kind, error: dropped.append(f"{kind}: {error}")), dropped


def test_a_block_arrives_whole_or_record_by_record() -> None:
    single, whole = OneByOne(), ByBlock()
    out, _ = box(single, whole)
    out.open(Run(Layout(()), ""))
    out.block(block(0, 1, 2))
    out.alerts([alert("spike"), alert("dead")])
    out.block(block(3))
    out.close(VERDICT)
    assert single.received == ["open", 0, 1, 2, "spike", "dead", 3, "close"]
    assert whole.received == ["open", [0, 1, 2], "spike", "dead", [3], "close"]


def test_a_sink_with_both_gets_blocks() -> None:
    class Both(ByBlock, OneByOne):
        pass

    out, _ = box(both := Both())
    out.block(block(0, 1))
    assert both.received == [[0, 1]]


def test_the_sinks_of_a_fit_share_one_summary_and_the_next_fit_has_another() -> None:
    class Asks(ByBlock):
        def open(self, run: Run) -> None:
            self.received.append(run.summary)

    first, last = Asks(), Asks()
    out, _ = box(first, last)
    for _ in range(2):
        out.open(Run(Layout(()), ""))
        out.open(Run(Layout(()), "with more parameters"))
        out.close(VERDICT)
    before, again, after = first.received[0], first.received[1], first.received[3]
    assert before is again is last.received[0] is not after
    assert after is last.received[3]


def test_one_that_fails_is_dropped_once_and_the_others_go_on() -> None:
    first, failing, last = OneByOne(), Failing(), ByBlock()
    out, dropped = box(first, failing, last)
    out.block(block(0, 1, 2))
    out.block(block(3))
    assert dropped == ["Failing: at 0"]
    assert first.received == [0, 1, 2, 3]
    assert last.received == [[0, 1, 2], [3]]
    assert out
    empty, _ = box()
    assert not empty


def test_of_two_equal_sinks_the_one_that_fails_is_dropped() -> None:
    class Equal(OneByOne):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

    class FailingEqual(Equal, Failing):
        record = Failing.record

    first, failing = Equal(), FailingEqual()
    out, _ = box(first, failing)
    out.block(block(0))
    out.alerts([alert("spike")])
    assert (first.received, failing.received) == ([0, "spike"], [])


def test_ctrl_c_in_one_sink_takes_nothing_from_the_others() -> None:
    class Interrupted(OneByOne):
        def record(self, record: Record) -> None:
            super().record(record)
            if record.step == 2:
                raise KeyboardInterrupt

    first, interrupted, whole, last = OneByOne(), Interrupted(), ByBlock(), OneByOne()
    out, _ = box(first, interrupted, whole, last)
    with pytest.raises(KeyboardInterrupt):
        out.block(block(0, 1, 2, 3, 4))
    out.alerts([alert("spike")])
    assert first.received == interrupted.received == last.received == [0, 1, 2, 3, 4, "spike"], "each of them once"
    assert whole.received == [[0, 1, 2, 3, 4], "spike"]
