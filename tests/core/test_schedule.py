"""The sampling schedule: the first steps always, then as often as the budget allows, and at once when asked."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.core.schedule import (
    EARLY_STEPS,
    FIRST_STEPS,
    FIXED_INTERVAL,
    LONGEST_INTERVAL,
    Sampler,
    SamplingSchedule,
)


def sampled(sampler: Sampler, steps: int, *, cost: float, step_seconds: float) -> list[int]:
    found = []
    for index in range(steps):
        if sampler.is_due(index):
            found.append(index)
            sampler.record_cost(index, cost, step_seconds)
    return found


@pytest.mark.parametrize("budget", [None, 0.001, 0.02, 0.9])
def test_first_steps_are_always_sampled(budget: float | None) -> None:
    found = sampled(Sampler(budget), 20, cost=1.0, step_seconds=0.001)
    assert found[:FIRST_STEPS] == list(range(FIRST_STEPS))


def test_a_young_run_is_sampled_whatever_it_costs() -> None:
    """At growing distances, beside the budget; then the budget rules."""
    found = sampled(Sampler(0.02), 500, cost=1.0, step_seconds=0.001)
    assert found == [*range(FIRST_STEPS), *sorted(EARLY_STEPS)]
    distances = [b - a for a, b in pairwise(found[FIRST_STEPS - 1 :])]
    assert distances == sorted(distances)


@given(
    budget=st.floats(0.001, 0.5),
    cost=st.floats(1e-5, 1e-1),
    step_seconds=st.floats(1e-4, 1.0),
)
def test_budget_is_kept(budget: float, cost: float, step_seconds: float) -> None:
    """After the early steps the samples take `budget` of the time, or as little as the longest interval allows."""
    steps, last = 5000, max(EARLY_STEPS)
    found = [i for i in sampled(Sampler(budget), steps, cost=cost, step_seconds=step_seconds) if i >= last]
    allowed = max(budget, cost / (LONGEST_INTERVAL * step_seconds))
    assert (len(found) - 1) * cost <= allowed * steps * step_seconds * 1.001
    # and the budget is used: the interval is not longer than it has to be
    for before, after in pairwise(found):
        assert after - before <= max(1, cost / (budget * step_seconds) + 1)


def test_no_budget_means_a_fixed_interval() -> None:
    found = sampled(Sampler(None), 200, cost=100.0, step_seconds=0.001)
    later = [i for i in found if i >= FIRST_STEPS]
    assert {b - a for a, b in pairwise(later)} == {FIXED_INTERVAL}


def test_even_the_costliest_sample_is_taken_at_times() -> None:
    found = sampled(Sampler(0.01), 3 * LONGEST_INTERVAL, cost=1e6, step_seconds=1e-6)
    assert len([i for i in found if i >= FIRST_STEPS]) >= 2


def test_one_slow_sample_does_not_stretch_the_interval() -> None:
    """The median of the recent costs decides: the first sample, which warms up, is an outlier."""
    sampler = Sampler(0.1)
    for cost in (9.0, 0.001, 0.001, 0.001):
        sampler.record_cost(0, cost, 0.01)
    assert sampler.interval(0.01) == 1


def test_attention_samples_the_next_steps() -> None:
    """As many as at the start, whatever the budget says; then the budget rules again."""
    sampler = Sampler(0.001)
    for index in range(FIRST_STEPS):
        sampler.record_cost(index, 1.0, 0.001)
    assert not sampler.is_due(70)
    sampler.sample_densely()
    found = []
    for index in range(70, 110):
        if sampler.is_due(index):
            found.append(index)
            sampler.record_cost(index, 1.0, 0.001)
    assert found == list(range(70, 70 + FIRST_STEPS))


@pytest.mark.parametrize("every", [1, 2, 10])
def test_every_n_steps(every: int) -> None:
    schedule = SamplingSchedule(every, 0.02)
    assert [i for i in range(40) if schedule.is_measured(i)] == list(range(0, 40, every))


def test_automatic_measuring_keeps_the_budget() -> None:
    schedule = SamplingSchedule("auto", 0.01)
    schedule.start_clock()
    measured = 0
    for index in range(400):
        time.sleep(0.0002)
        schedule.add_training_time(step=True)
        if schedule.is_measured(index):
            measured += 1
            schedule.record_cost(index, 0.001, sampled=schedule.is_sampled(index))
    assert FIRST_STEPS + len(EARLY_STEPS) <= measured < 100


def test_clock_counts_training_and_our_share() -> None:
    """Validation, between a lap and the next begin, is no training time."""
    schedule = SamplingSchedule(1, 0.02)
    assert schedule.overhead == 0
    assert schedule.step_seconds == 0
    for _ in range(5):
        schedule.start_clock()
        time.sleep(0.004)
        begun = schedule.add_training_time(step=True)
        time.sleep(0.001)
        schedule.add_overhead(begun)
        schedule.add_training_time(step=False)
        time.sleep(0.02)  # validation
    assert 0.025 <= schedule.training_seconds < 0.09
    assert 0.005 <= schedule.overhead_seconds < 0.03
    assert 0.05 < schedule.overhead < 0.6
    assert 0.004 <= schedule.step_seconds < 0.02


def test_micro_batches_are_one_step() -> None:
    schedule = SamplingSchedule(1, 0.02)
    for _ in range(3):
        for micro in range(3):
            schedule.start_clock()
            time.sleep(0.002)
            schedule.add_training_time(step=micro == 2)
    assert schedule.step_seconds >= 0.006


@given(spent=st.floats(0, 100), total=st.floats(0, 100))
def test_share_is_a_share(spent: float, total: float) -> None:
    schedule = SamplingSchedule(1, None)
    schedule.overhead_seconds, schedule.training_seconds = spent, total
    assert 0 <= schedule.overhead <= 1


@pytest.mark.parametrize("every", [3, "auto"])
@pytest.mark.parametrize("stop", [2, 5, 60, 61, 70, 119])
def test_a_resumed_pace_goes_on_with_the_same_steps(every: Any, stop: int) -> None:
    """Costs differ from step to step and something looks odd at step 60: the same steps follow, stopped or not."""

    def paced(stop: int | None) -> list[tuple[bool, bool]]:
        schedule, found = SamplingSchedule(every, 0.02), []
        for index in range(150):
            if index == stop:
                state = json.loads(json.dumps(schedule.state_dict()))
                schedule = SamplingSchedule(every, 0.02)
                schedule.load_state_dict(state)
            schedule._steps.append(0.001)  # a step's time, without a clock
            measured = schedule.is_measured(index)
            sampled = measured and schedule.is_sampled(index)
            found.append((measured, sampled))
            if index == 60:
                schedule.sample_densely()
            if measured:
                schedule.record_cost(index, 0.0001 + 1e-6 * (index % 7), sampled=sampled)
        return found

    uninterrupted = paced(None)
    assert {(True, True), (True, False), (False, False)} >= set(uninterrupted)
    assert 5 < sum(sampled for _, sampled in uninterrupted) < 60
    assert paced(stop) == uninterrupted


@pytest.mark.parametrize(
    "change", [{"sampling": None}, {"sampling": {}}, {"measuring": {"next": "x"}}, {"steps": ["x"]}, {"steps": 3}]
)
def test_a_damaged_pace_changes_nothing(change: dict[str, Any]) -> None:
    schedule = SamplingSchedule(1, None)
    for index in range(7):
        schedule.record_cost(index, 1.0, sampled=True)
    before = schedule.state_dict()
    with pytest.raises(ValueError, match="the sampling schedule in the state is damaged"):
        schedule.load_state_dict({**before, **change})
    assert schedule.state_dict() == before
