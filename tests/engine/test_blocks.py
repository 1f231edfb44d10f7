"""Cutting is invisible: recorded runs give the same alerts, incidents, trusted rows and notes in blocks of any size."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradwatch.core.alert import Alert
from gradwatch.core.block import AFTER_STEP
from gradwatch.core.record import Layout, Record, Run
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.rules import default_rules
from quick import cases
from recorded_runs import RUNS, RecordedRun, recorded
from synthetic_records import block_of

QUICK = ("spikes", "divergence", "dead", "two optimizers")
"""Runs whose rows are cut in the quick tests."""


class Judged:
    """What a diagnosis tells: alerts as they are raised, and the open incidents at every row."""

    def __init__(self, run: RecordedRun) -> None:
        self.raised: list[Alert] = []
        self.incidents: list[Any] = []
        self.diagnosis = Diagnosis(default_rules(), (), on_alert=self.raised.append)
        self.diagnosis.on_incidents = lambda new, old, step: self.incidents.append((list(new), list(old), step))
        self.diagnosis.open(Run(run.records[0].layout, ""), run.loop)

    def relayout(self, layout: Layout) -> None:
        if layout is not self.diagnosis.history.layout:
            self.diagnosis.history.relayout(layout)

    @property
    def all(self) -> tuple[Any, ...]:
        made = self.diagnosis
        return self.raised, self.incidents, made.incidents.state_dict(), made.notes, str(made.verdict(0.0))


def in_blocks(run: RecordedRun, sizes: Callable[[], int]) -> Judged:
    judged = Judged(run)
    for block in run.blocks(sizes):
        judged.relayout(block.layout)
        judged.diagnosis.judge(block)
    return judged


def row_by_row(run: RecordedRun) -> Judged:
    """As a step that is judged before it is taken, and completed after that."""
    judged = Judged(run)
    for record in run.records:
        judged.relayout(record.layout)
        early, late = parts(record)
        judged.diagnosis.judge(block_of([replace(record, values=early[0], scalars=early[1])]))
        judged.diagnosis.history.amend(*late)
    return judged


def parts(record: Record) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """What is known before the step, and what is known after it."""
    early = {name: numbers for name, numbers in record.values.items() if name not in AFTER_STEP}
    late = {name: numbers for name, numbers in record.values.items() if name in AFTER_STEP}
    before = {name: number for name, number in record.scalars.items() if name not in AFTER_STEP}
    after = {name: number for name, number in record.scalars.items() if name in AFTER_STEP}
    return (early, before), (late, after)


@pytest.mark.parametrize("name", cases(RUNS, QUICK))
def test_blocks_of_any_size_are_judged_alike(name: str) -> None:
    run, chance = recorded(name), random.Random(name)
    first = row_by_row(run)
    for sizes in (lambda: 7, lambda: 32, lambda: chance.randint(1, 40)):
        other = in_blocks(run, sizes)
        assert other.all == first.all
        one, two = first.diagnosis.history, other.diagnosis.history
        assert one.steps == two.steps
        np.testing.assert_array_equal(one.trusted(len(one)), two.trusted(len(two)))
        for statistic in one.statistics():
            np.testing.assert_array_equal(one.series(statistic), two.series(statistic))
            assert one.newest(statistic) == two.newest(statistic)


@pytest.mark.parametrize("name", cases([name for name in RUNS if name not in ("nonfinite",)], QUICK))
def test_what_the_training_was_shown_is_found_again(name: str) -> None:
    """`nonfinite` is left out where the batch is run again."""
    run = recorded(name)
    again = in_blocks(run, lambda: 32).diagnosis.incidents.alerts
    assert [alert for alert in again if alert.rule != "nonfinite"] == [
        alert for alert in run.alerts if alert.rule != "nonfinite"
    ]


def test_the_runs_have_the_faults() -> None:
    """Of what is quiet nothing can be seen to change."""
    found = {name: {one.rule for alert in recorded(name).alerts for one in (alert, *alert.effects)} for name in QUICK}
    assert found["spikes"] == {"spike"}
    assert "divergence" in found["divergence"]
    assert "dead" in found["dead"]
    assert "spike" in found["two optimizers"]
