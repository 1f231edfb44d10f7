"""The diagnosis judges blocks: it calls rules at the rows that they suspect, and keeps what findings name out of the
baselines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import gradwatch
from gradwatch.core.alert import Finding, Severity
from gradwatch.core.block import Block
from gradwatch.core.history import History
from gradwatch.core.record import Mask, Missing, Run
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.rules import Rule, Spike, default_rules
from gradwatch.rules.evidence.recent_rows import RecentRows
from synthetic_history import layout, net, record
from synthetic_records import block_of


def opened(rules: Sequence[Rule], sinks: Sequence[Any] = ()) -> Diagnosis:
    diagnosis = Diagnosis(rules, sinks, on_alert=lambda alert: None)
    diagnosis.open(Run(net().layout, ""))
    return diagnosis


def block(diagnosis: Diagnosis, rows: Sequence[dict[str, Any]]) -> Block:
    scratch = net()
    scratch.relayout(diagnosis.history.layout)
    for row in rows:
        record(scratch, **row)
    return block_of([scratch[place] for place in range(len(rows))])


def events_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """What a profiler sees during `call`: 'call', 'c_call' and so on, each with the file in which that is."""
    events: list[tuple[str, str]] = []

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        events.append((event, frame.f_code.co_filename))

    profiler = sys.getprofile()
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(profiler)
    return events


class Counted:
    """Finds a fault at some steps, and notes where it was called."""

    name = "counted"
    needs: frozenset[str] = frozenset({"grad_norm"})

    def __init__(self, *faults: int) -> None:
        self.faults, self.steps = faults, list[int]()

    def __call__(self, history: History) -> list[Finding]:
        self.steps.append(history.steps[-1])
        at = history.steps[-1] in self.faults
        return [Finding(self.name, Severity.WARNING, "fc0", ("fc0",), 1.0, 0.0, "a", "b")] if at else []


class Selective(Counted):
    """Suspects its faults."""

    def suspects(self, rows: RecentRows) -> Mask:
        return np.isin(rows.history.steps[-rows.count :], self.faults)


@pytest.mark.parametrize("size", [1, 40])
def test_each_of_several_spikes_is_found(size: int) -> None:
    """A finding taints the row that it names: the spike itself, not the row at which the gradient is back."""
    diagnosis = opened([Spike()])
    rows = [{"gradients": 15.0 if step in (60, 90, 120) else 1.0, "loss": 1.0} for step in range(160)]
    whole = block(diagnosis, rows)
    for begin in range(0, 160, size):
        diagnosis.judge(whole.rows(begin, begin + size))
    (alert,) = diagnosis.incidents.alerts
    assert (alert.step, alert.noticed, alert.times) == (60, 61, 3)
    assert np.flatnonzero(~diagnosis.history.trusted(160).all(axis=1)).tolist() == [60, 90, 120]


def test_a_rule_is_called_where_it_suspects_and_while_its_incident_is_open() -> None:
    rule = Selective(5, 30)
    diagnosis = opened([rule])
    diagnosis.judge(block(diagnosis, [{}] * 60))
    # an incident closes after 20 evaluations without a finding
    assert rule.steps == [*range(5, 26), *range(30, 51)]
    (alert,) = diagnosis.incidents.alerts
    assert (alert.step, alert.closed_step, alert.times) == (5, 30, 2)


def test_a_rule_without_suspects_is_called_at_every_row() -> None:
    rule = Counted(5)
    diagnosis = opened([rule])
    diagnosis.judge(block(diagnosis, [{}] * 40))
    assert rule.steps == list(range(40))


def test_a_rule_of_samples_without_suspects_is_called_at_samples() -> None:
    """While its incident is open, too: between samples it would find nothing, and close it."""
    rule = Counted(10)
    rule.needs = frozenset({"weight_norm"})
    diagnosis = opened([rule])
    diagnosis.judge(block(diagnosis, [{"weights": 1.0} if step % 10 == 0 else {} for step in range(40)]))
    assert rule.steps == [0, 10, 20, 30]
    assert diagnosis.incidents.open_faults


@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_a_sample_of_what_follows_a_step_is_new_at_the_next_row(size: int) -> None:
    rule, sampled = Counted(), (2, 5, 11)
    rule.needs = frozenset({"update_ratio"})
    diagnosis = opened([rule])
    whole = block(diagnosis, [{}] * 12)
    updates = np.full(whole.codes.shape, np.nan)
    updates[sampled, :] = 1e-3
    there = np.isin(np.arange(12), sampled)
    whole = replace(
        whole,
        values={**whole.values, "update_ratio": updates},
        measured={**whole.measured, "update_ratio": there},
    )
    for begin in range(0, 12, size):
        diagnosis.judge(whole.rows(begin, begin + size))
    assert rule.steps == [3, 6]


def test_a_rule_of_samples_is_not_asked_of_rows_without_one() -> None:
    asked = []

    class Asked(Selective):
        def suspects(self, rows: RecentRows) -> Mask:
            asked.append(rows.history.steps[-1])
            return rows.nowhere

    rule = Asked()
    rule.needs = frozenset({"weight_norm"})
    diagnosis = opened([rule])
    whole = block(diagnosis, [{"weights": 1.0} if step == 14 else {} for step in range(30)])
    for begin in range(0, 30, 10):
        diagnosis.judge(whole.rows(begin, begin + 10))
    assert asked == [19]


@pytest.mark.parametrize("answer", [ValueError("no idea"), np.zeros(3, dtype=bool)])
def test_a_rule_whose_suspects_fail_is_switched_off(answer: Any) -> None:
    class Failing(Selective):
        def suspects(self, rows: RecentRows) -> Mask:
            if isinstance(answer, Exception):
                raise answer
            found: Mask = answer
            return found

    rule, other = Failing(5), Counted()
    other.name = "other"
    diagnosis = opened([rule, other])
    diagnosis.judge(block(diagnosis, [{}] * 10))
    assert (rule.steps, other.steps) == ([], list(range(10)))
    (note,) = diagnosis.notes
    assert note.startswith("the rule counted failed and was switched off: ValueError: ")


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EOFError(), "EOFError"),
        (SpeechlessError(), "SpeechlessError"),
        (RuntimeError("two\n  lines"), "RuntimeError: two lines"),
    ],
)
def test_whatever_a_rule_raises_it_alone_is_switched_off_in_one_line(error: Exception, said: str) -> None:
    class Failing(Counted):
        def __call__(self, history: History) -> Any:
            raise error

    other = Counted()
    other.name = "other"
    diagnosis = opened([Failing(), other])
    diagnosis.judge(block(diagnosis, [{}] * 10))
    assert diagnosis.notes == [f"the rule counted failed and was switched off: {said}"]
    assert other.steps == list(range(10))


def finding(**fields: Any) -> Finding:
    given: dict[str, Any] = {"layer": "fc0", "sites": ("fc0",), "value": 1.0, "message": "a", "remedy": "b"}
    return Finding(**{"rule": "own", "severity": Severity.WARNING, "threshold": 0.0, **given, **fields})


RETURNED = "result=%s: expected a list of findings, or None"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda: 3, f"TypeError: {RETURNED % 3}"),
        (lambda: ["fc0"], f"TypeError: {RETURNED % ['fc0']}"),
        (lambda: {"fc0": finding()}, "TypeError: result={'fc0': "),
        (finding, "TypeError: result=Finding(rule='own', "),
        (lambda: [finding(severity="bad")], "ValueError: severity='bad': expected one of 'notice', 'warning', 'error'"),
        (lambda: [finding(layer=0)], "TypeError: layer=0: expected text"),
        (lambda: [finding(message=None)], "TypeError: message=None: expected text"),
        (lambda: [finding(value=None)], "TypeError: value=None: expected a number"),
        (lambda: [finding(sites="fc0")], "TypeError: sites='fc0': expected a tuple of names of layers"),
        (lambda: [finding(sites=(0,))], "TypeError: sites=(0,): expected a tuple of names of layers"),
        (lambda: [finding(effects=("dead",))], "TypeError: effects=('dead',): expected a tuple of objects `Effect`"),
        (lambda: [finding(onset=1.0)], "TypeError: onset=1.0: expected a number of records of at least 1"),
        (lambda: [finding(onset=0)], "ValueError: onset=0: expected a number of records of at least 1"),
    ],
)
def test_a_rule_that_returns_no_findings_is_switched_off_alone(answer: Callable[[], Any], error: str) -> None:
    class Own(Counted):
        name = "own"

        def __call__(self, history: History) -> Any:
            return answer()

    other = Counted()
    diagnosis = opened([Own(), other])
    diagnosis.judge(block(diagnosis, [{}] * 10))
    (note,) = diagnosis.notes
    assert note.startswith(f"the rule own failed and was switched off: {error}")
    assert other.steps == list(range(10))
    assert not diagnosis.verdict(0.0).incidents


def test_a_finding_may_have_its_severity_as_text_and_its_layers_in_a_list() -> None:
    assert finding(severity="error", sites=["fc0"]) == finding(severity=Severity.ERROR)
    assert finding(severity="error").severity is Severity.ERROR


def test_rows_are_sent_on_as_a_block() -> None:
    got: list[Block] = []

    class Sink:
        def open(self, run: Run) -> None: ...

        def block(self, block: Block) -> None:
            got.append(block)

        def alert(self, alert: Any) -> None: ...

        def close(self, verdict: Any) -> None: ...

    diagnosis = opened([], [Sink()])
    rows = block(diagnosis, [{"gradients": float(step), "loss": 1.0} for step in range(8)])
    diagnosis.judge(rows)
    diagnosis.history.amend({}, {"skipped": 1.0})
    diagnosis.dispatcher.block(diagnosis.history.block(8))
    (sent,) = got
    np.testing.assert_array_equal(sent.values["grad_norm"], rows.values["grad_norm"])
    assert sent.steps.tolist() == list(range(8))
    assert np.flatnonzero(sent.scalars["skipped"] == 1).tolist() == [7]


def test_a_quiet_block_takes_few_calls() -> None:
    """Of ours, for all default rules; one row after the other took 3,200."""
    diagnosis = opened(default_rules())
    steady = {"loss": 1.0, "lr": 0.1}
    diagnosis.judge(block(diagnosis, [{**steady, "signals": 1.0, "weights": 5.0}] * 5 + [steady] * 91))
    quiet, folder = block(diagnosis, [steady] * 32), str(Path(gradwatch.__file__).parent)
    ours = [event for event in events_of(lambda: diagnosis.judge(quiet)) if event[1].startswith(folder)]
    assert not diagnosis.incidents.alerts
    assert 20 < sum(kind == "call" for kind, _ in ours) <= 85


def test_the_verdict_takes_as_many_calls_a_layer_in_a_large_model() -> None:
    def calls(depth: int) -> int:
        """Of a model of which every other layer is unused."""
        names = [f"fc{i}" for i in range(depth)]
        diagnosis = Diagnosis([], (), on_alert=lambda alert: None)
        diagnosis.open(Run(layout(names, order=names[::2]), ""))
        scratch = net(depth, order=names[::2])
        record(scratch, codes=dict.fromkeys(names[1::2], Missing.NO_GRADIENT))
        diagnosis.judge(block_of([scratch[0]]))
        count = len(events_of(lambda: diagnosis.verdict(0.0)))
        assert len(diagnosis.verdict(0.0).untrained) == depth
        return count

    assert calls(200) < 6 * calls(50)
