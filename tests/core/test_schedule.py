"""The sampling schedule: the first steps always, then one in so many, by counts alone; and the clock beside it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.core.overhead import Overhead
from gradwatch.core.schedule import (
    DENSE_AFTER,
    EARLY_STEPS,
    FIRST_STEPS,
    FIXED_INTERVAL,
    LONGEST_INTERVAL,
    MEASURE,
    MEASURE_ELEMENT,
    MEASURE_TENSOR,
    STEP,
    STEP_ELEMENT,
    STEP_MODULE,
    WHOLE_UNTIL,
    SamplingSchedule,
)


def schedule_for(modules: int, elements: int, *, budget: float | None = 0.02, every: Any = 1) -> SamplingSchedule:
    schedule = SamplingSchedule(every, budget)
    schedule.set_counts(modules=modules, tensors=2 * modules, elements=elements)
    return schedule


def sampled(schedule: SamplingSchedule, steps: int) -> list[int]:
    return [index for index in range(steps) if schedule.is_measured(index) and schedule.is_sampled(index)]


@pytest.mark.parametrize("budget", [None, 0.001, 0.02, 0.9])
def test_first_steps_are_always_sampled(budget: float | None) -> None:
    assert sampled(schedule_for(100, 10**6, budget=budget), 20)[:FIRST_STEPS] == list(range(FIRST_STEPS))


def test_a_young_run_is_sampled_whatever_it_costs() -> None:
    """At growing distances, beside the budget."""
    found = sampled(schedule_for(10**4, 10**6, budget=1e-6), 500)
    assert {*range(FIRST_STEPS), *EARLY_STEPS} <= set(found)
    assert len(found) <= FIRST_STEPS + len(EARLY_STEPS) + 1


@given(modules=st.integers(0, 3000), elements=st.integers(0, 10**9), budget=st.floats(1e-4, 0.9))
def test_one_sample_in_each_interval(modules: int, elements: int, budget: float) -> None:
    """At a place that varies."""
    schedule = schedule_for(modules, elements, budget=budget)
    assert 1 <= schedule.interval <= LONGEST_INTERVAL
    first = max(EARLY_STEPS) // schedule.interval + 1
    for number in range(first, first + 30):
        start = number * schedule.interval
        assert sum(schedule.is_sampled(index) for index in range(start, start + schedule.interval)) == 1


def test_samples_do_not_beat_against_epochs() -> None:
    schedule = schedule_for(20, 10**5)
    interval = schedule.interval
    places = {index % interval for index in sampled(schedule, 200 * interval) if index > max(EARLY_STEPS)}
    assert len(places) > interval / 2


def test_larger_budgets_sample_more_often() -> None:
    intervals = [schedule_for(100, 3 * 10**6, budget=budget).interval for budget in (0.001, 0.01, 0.02, 0.1, 0.9)]
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] > intervals[-1]


def test_no_budget_means_a_fixed_interval() -> None:
    later = [index for index in sampled(schedule_for(5000, 10**9, budget=None), 200) if index >= FIRST_STEPS]
    assert {b - a for a, b in pairwise(later)} == {FIXED_INTERVAL}


def test_even_the_costliest_sample_is_taken_at_times() -> None:
    schedule = schedule_for(10**6, 0, budget=1e-9, every="auto")
    assert schedule.interval == LONGEST_INTERVAL
    assert schedule.is_measured(7 * LONGEST_INTERVAL)


@pytest.mark.parametrize("budget", [None, 0.02, 1e-6])
@pytest.mark.parametrize("every", [1, 3])
def test_the_next_sample_is_the_first_that_comes(budget: float | None, every: int) -> None:
    schedule = schedule_for(50, 10**6, budget=budget, every=every)
    schedule.sample_densely(60)
    samples = sampled(schedule, 3_000)
    for index in range(samples[-1] + 1):
        assert schedule.next_sampled(index) == next(sample for sample in samples if sample >= index)


def test_a_finding_has_steps_in_a_row_sampled_some_time_after() -> None:
    schedule = schedule_for(10**4, 10**6, budget=1e-6)
    schedule.sample_densely(300)
    begin = 300 + DENSE_AFTER
    found = [index for index in sampled(schedule, 600) if index > max(EARLY_STEPS)]
    assert set(range(begin, begin + FIRST_STEPS)) <= set(found)
    assert len(found) <= FIRST_STEPS + 1


@given(
    findings=st.lists(st.tuples(st.integers(0, 400), st.integers(0, DENSE_AFTER - FIRST_STEPS)), max_size=8),
    every=st.sampled_from([1, 3]),
)
def test_when_a_finding_is_told_changes_no_sample(findings: list[tuple[int, int]], every: int) -> None:
    """As where blocks are cut by the clock: in the order of the steps, and each some steps later."""

    def samples(*, late: bool) -> list[int]:
        schedule, found = schedule_for(10**4, 10**6, budget=1e-6, every=every), []
        waiting = sorted(findings)
        for index in range(700):
            while waiting and waiting[0][0] + waiting[0][1] * late <= index:
                schedule.sample_densely(waiting.pop(0)[0])
            if schedule.is_measured(index) and schedule.is_sampled(index):
                found.append(index)
        return found

    assert samples(late=True) == samples(late=False)


@pytest.mark.parametrize("first", [200, 1000])
def test_each_of_two_optimizers_has_its_dense_samples(first: int) -> None:
    """One has taken five times as many steps as the other."""
    schedule = schedule_for(10**4, 10**6, budget=1e-6)
    schedule.sample_densely(first)
    schedule.sample_densely(1200 - first)
    found = sampled(schedule, 1_200)
    for begin in (200 + DENSE_AFTER, 1000 + DENSE_AFTER):
        assert set(range(begin, begin + FIRST_STEPS)) <= set(found)


@pytest.mark.parametrize("every", [1, 2, 10])
def test_every_n_steps(every: int) -> None:
    """Among the measured steps, as many are sampled as among all."""
    schedule = schedule_for(20, 10**5, every=every)
    assert [index for index in range(40) if schedule.is_measured(index)] == list(range(0, 40, every))
    found = sampled(schedule, 1000 * every)
    assert [index // every for index in found] == sampled(schedule_for(20, 10**5), 1000)
    schedule.sample_densely(100)
    begin = 100 + DENSE_AFTER
    dense = [index for index in sampled(schedule, 400) if begin <= index < begin + FIRST_STEPS * every]
    assert len(dense) >= FIRST_STEPS


def test_automatic_measuring_keeps_the_budget() -> None:
    schedule = schedule_for(1000, 10**6, budget=0.001, every="auto")
    measured = [index for index in range(400) if schedule.is_measured(index)]
    assert FIRST_STEPS + len(EARLY_STEPS) <= len(measured) < 100
    assert set(sampled(schedule, 400)) <= set(measured)
    steps = range(1_000, 20_000)
    count = sum(schedule.is_measured(index) and not schedule.is_sampled(index) for index in steps)
    measure = MEASURE + MEASURE_TENSOR * 2_000 + MEASURE_ELEMENT * 10**6
    step = STEP + STEP_MODULE * 1_000 + STEP_ELEMENT * 10**6
    assert count * measure / (len(steps) * step) == pytest.approx(0.001, rel=0.05)


def test_early_samples_are_whole_and_one_in_four_after_them() -> None:
    schedule = schedule_for(50, 10**6)
    samples = sampled(schedule, 8_000)
    whole = [index for index in samples if schedule.is_whole_sample(index)]
    early = [index for index in samples if index <= WHOLE_UNTIL]
    assert whole[: len(early)] == early
    assert len(whole) - len(early) == pytest.approx((len(samples) - len(early)) / 4, rel=0.1)


@pytest.mark.parametrize("every", [3, "auto"])
@pytest.mark.parametrize("stop", [2, 5, 60, 61, 70, 119])
def test_a_resumed_schedule_goes_on_with_the_same_steps(every: Any, stop: int) -> None:
    """Something was found at step 20: the same steps follow, stopped or not, even where the model has grown since."""
    whole = schedule_for(50, 10**6, every=every)
    whole.sample_densely(20)
    resumed = schedule_for(60, 10**6, every=every)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    steps = range(stop, 400)
    assert [(whole.is_measured(i), whole.is_sampled(i)) for i in steps] == [
        (resumed.is_measured(i), resumed.is_sampled(i)) for i in steps
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"interval": None},
        {"interval": 0},
        {"measure_interval": "x"},
        {"dense_from": 1},
        {"dense_from": ["x"]},
        {"interval": {}},
    ],
)
def test_a_damaged_state_changes_nothing(change: dict[str, Any]) -> None:
    schedule = schedule_for(50, 10**6)
    before = schedule.state_dict()
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(change))}="):
        schedule.load_state_dict({**before, **change})
    assert schedule.state_dict() == before


# ---- the clock


def test_clock_counts_training_and_our_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation, between a stop and the next start, is no training time."""
    now = [0.0]
    monkeypatch.setattr("gradwatch.core.overhead.perf_counter", lambda: now[0])
    overhead = Overhead()
    assert overhead.share == 0
    for _ in range(5):
        overhead.started = now[0]
        now[0] += 0.005
        overhead.add(now[0] - 0.001)
        overhead.stop()
        now[0] += 0.02  # validation
    assert overhead.training_seconds == pytest.approx(0.025)
    assert overhead.seconds == pytest.approx(0.005)
    assert overhead.share == pytest.approx(0.2)


@given(spent=st.floats(0, 100), total=st.floats(0, 100))
def test_share_is_a_share(spent: float, total: float) -> None:
    overhead = Overhead()
    overhead.seconds = spent
    overhead._training_seconds = total
    assert 0 <= overhead.share <= 1
