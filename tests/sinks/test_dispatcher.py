"""What goes out to the sinks: in order, to the patient ones some at a time, and never to one that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from gradwatch.core.alert import Alert, Severity, Verdict
from gradwatch.core.record import Layout, Record, Run
from gradwatch.sinks import dispatcher
from gradwatch.sinks.dispatcher import BURST, Dispatcher

VERDICT = Verdict((), 0, 0, 0.0, {})


class Prompt:
    """Remembers all that it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def open(self, run: Run) -> None:
        self.told.append("open")

    def record(self, record: Record) -> None:
        self.told.append(record.step)

    def alert(self, alert: Alert) -> None:
        self.told.append(alert.rule)

    def close(self, verdict: Verdict) -> None:
        self.told.append("close")


class Patient(Prompt):
    patient: ClassVar[bool] = True


class Failing(Patient):
    def record(self, record: Record) -> None:
        raise ZeroDivisionError(f"at {record.step}")


def record(step: int) -> Record:
    return Record(step, step, 0, Layout(()), {}, {}, np.zeros(0, dtype=np.int8))


def alert(rule: str) -> Alert:
    return Alert(rule, Severity.WARNING, "a", ("a",), 0, 1.0, 1.0, "message", "remedy")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Where the time stands, seconds."""
    now = [0.0]
    monkeypatch.setattr(dispatcher, "monotonic", lambda: now[0])
    return now


def box(*sinks: Prompt) -> tuple[Dispatcher, list[str]]:
    dropped: list[str] = []
    return Dispatcher(sinks, dropped=lambda kind, error: dropped.append(f"{kind}: {error}")), dropped


@pytest.mark.usefixtures("clock")
def test_the_patient_get_their_records_together_and_nothing_is_lost() -> None:
    prompt, patient = Prompt(), Patient()
    out, _ = box(prompt, patient)
    for step in range(BURST - 1):
        out.record(record(step))
    assert prompt.told == list(range(BURST - 1))
    assert patient.told == []
    out.record(record(BURST - 1))
    assert patient.told == prompt.told == list(range(BURST))
    out.record(record(BURST))
    out.deliver()
    out.close(VERDICT)
    assert patient.told == prompt.told == [*range(BURST + 1), "close"]


def test_no_record_waits_for_long(clock: list[float]) -> None:
    patient = Patient()
    out, _ = box(patient)
    for step in range(4):
        clock[0] = 0.09 * step
        out.record(record(step))
    assert patient.told == [0, 1, 2, 3], "a fifth of a second after the last ones"
    clock[0] = 10.0
    out.record(record(4))
    assert patient.told[-1] == 4, "slow steps wait for nothing"


@pytest.mark.usefixtures("clock")
def test_what_else_there_is_to_tell_comes_after_the_records_before_it() -> None:
    prompt, patient = Prompt(), Patient()
    out, _ = box(prompt, patient)
    out.record(record(0))
    out.alerts([alert("spike")])
    out.record(record(1))
    out.open(Run(Layout(()), ""))
    assert prompt.told == patient.told == [0, "spike", 1, "open"]


@pytest.mark.usefixtures("clock")
def test_one_that_fails_is_dropped_once_and_the_others_go_on() -> None:
    prompt, failing, patient = Prompt(), Failing(), Patient()
    out, dropped = box(prompt, failing, patient)
    for step in range(2 * BURST):
        out.record(record(step))
    assert dropped == ["Failing: at 0"]
    assert prompt.told == patient.told == list(range(2 * BURST))
    assert out
    nobody, _ = box()
    assert not nobody


class Joined(Prompt):
    unhurried: ClassVar[bool] = True

    def record_all(self, records: Sequence[Record]) -> None:
        self.told.append([record.step for record in records])


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("together", [False, True])
def test_the_unhurried_wait_only_where_nobody_waits_for_them(together: bool) -> None:
    joined, patient = Joined(), Patient()
    out, _ = box(joined, patient)
    out.together = together
    for step in range(3):
        out.record(record(step))
    assert joined.told == ([] if together else [0, 1, 2])
    out.alerts([alert("spike")])
    assert joined.told == ([[0, 1, 2], "spike"] if together else [0, 1, 2, "spike"])
    out.record(record(3))
    out.deliver()
    out.close(VERDICT)
    assert joined.told[-2:] == [[3] if together else 3, "close"]
    assert patient.told == [0, 1, 2, "spike", 3, "close"]


@pytest.mark.usefixtures("clock")
def test_ctrl_c_in_one_sink_takes_nothing_from_the_others() -> None:
    class Interrupted(Patient):
        def record(self, record: Record) -> None:
            super().record(record)
            if record.step == 2:
                raise KeyboardInterrupt

    first, interrupted, joined, last = Patient(), Interrupted(), Joined(), Patient()
    out, _ = box(first, interrupted, joined, last)
    out.together = True
    for step in range(5):
        out.record(record(step))
    with pytest.raises(KeyboardInterrupt):
        out.deliver()
    assert (first.told, interrupted.told, joined.told, last.told) == ([0, 1, 2, 3, 4], [0, 1, 2], [], [])
    out.deliver()
    assert first.told == interrupted.told == last.told == [0, 1, 2, 3, 4], "each of them once"
    assert joined.told == [[0, 1, 2, 3, 4]]
