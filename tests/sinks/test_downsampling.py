"""The course of a statistic over a run: extremes, last and median beside numpy's on the whole series."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradwatch.sinks.downsampling import MAX_COLUMNS, Downsampling
from gradwatch.sinks.map_rows import most_distinct
from gradwatch.sinks.run_summary import RunSummary
from gradwatch.tensorboard_plugin.matrix import NOT_A_NUMBER, Matrix, summarised
from quick import examples
from sink_inputs import NORMS, layout_of, record_of
from synthetic_records import block_of


def course_of(norms: Any, measured: Any = None, *, cuts: Any = (), first: int = 0, **options: Any) -> Downsampling:
    """`cuts`: the rows at which another block begins."""
    course = Downsampling(norms.shape[1], **options)
    axis, measured = np.arange(first, first + len(norms)), np.ones(norms.shape, bool) if measured is None else measured
    for rows in np.split(np.arange(len(norms)), cuts):
        course.extend(axis[rows], norms[rows], measured[rows])
    return course


@given(st.integers(1, 200).flatmap(lambda n: arrays(float, (n, 3), elements=NORMS)), st.data())
@examples(40)
def test_a_course_agrees_with_all_the_numbers(norms: Any, data: st.DataObject) -> None:
    measured = data.draw(arrays(bool, norms.shape))
    course = course_of(norms, measured, cuts=sorted(data.draw(st.sets(st.integers(1, len(norms)), max_size=5))))
    for row in range(3):
        kept = norms[measured[:, row], row]
        assert course.seen[row] == bool(kept.size)
        if not kept.size:
            assert all(math.isnan(of[row]) for of in (course.minimum, course.maximum, course.median, course.last))
            continue
        np.testing.assert_equal(course.last[row], kept[-1])
        finite = np.sort(kept[np.isfinite(kept)]) if np.isfinite(kept).any() else np.array([np.nan])
        np.testing.assert_equal([course.minimum[row], course.maximum[row]], finite[[0, -1]])
        # a float32 logarithm of up to 320 is known to 2e-5
        assert course.median[row] == pytest.approx(finite[(len(finite) - 1) // 2], rel=1e-4, abs=1e-323, nan_ok=True)


def test_a_long_run_keeps_its_extremes_and_its_median_in_bounded_memory() -> None:
    rng, n = np.random.default_rng(0), 20_000
    norms = 10 ** rng.normal(size=(n, 2))
    norms[12_345, 0], norms[778, 1] = 1e9, 1e-9
    norms[:, 1][1::2] *= 100  # every other step: a sample at even steps would be wrong
    course = course_of(norms, cuts=range(32, n, 32))
    assert course.maximum[0] == pytest.approx(1e9, rel=1e-4)
    assert course.minimum[1] == pytest.approx(1e-9, rel=1e-4, abs=0)
    np.testing.assert_array_equal(course.last, norms[-1])
    assert course.median_of == "of 157 steps, one of every 128"
    assert course_of(norms[:MAX_COLUMNS]).median_of == ""
    assert np.abs(np.log10(course.median) - np.log10(np.median(norms, axis=0))).max() < 0.3
    assert MAX_COLUMNS // 2 <= len(course) <= MAX_COLUMNS


def test_neither_cuts_nor_looks_change_anything() -> None:
    rng = np.random.default_rng(1)
    norms, measured = 10 ** rng.normal(size=(1_000, 3)), rng.random((1_000, 3)) < 0.7
    norms[rng.random(norms.shape) < 0.1] = rng.choice([0.0, np.inf, np.nan])
    courses = [
        course_of(norms, measured, cuts=cuts) for cuts in ((), range(1, 1_000), np.sort(rng.integers(0, 1_000, 40)))
    ]
    looked_at = Downsampling(3)
    for step in range(1_000):
        looked_at.extend(np.array([step]), norms[step : step + 1], measured[step : step + 1])
        if step % 7 == 0:
            here = measured[step]
            assert looked_at.last[here].tolist() == pytest.approx(norms[step, here].tolist(), nan_ok=True)
    one, *others = [*courses, looked_at]
    for other in others:
        for name in ("seen", "last", "minimum", "maximum", "median", "axis", "stride"):
            np.testing.assert_array_equal(getattr(other, name), getattr(one, name), err_msg=name)
        for shown, too in zip(other.extremes(), one.extremes(), strict=True):
            np.testing.assert_array_equal(shown, too)


@pytest.mark.parametrize("first", [0, 5])
def test_columns_keep_extremes_however_long_the_run(first: int) -> None:
    numbers = 10 ** np.random.default_rng(0).normal(0, 1, (100, 3))
    numbers[37] = [0.0, np.inf, np.nan]
    measured = ~np.isnan(numbers)
    course = course_of(numbers, measured, first=first, columns=8, cuts=range(7, 100, 7))
    course.grow(4)
    assert (course.stride, course.axis, len(course)) == (16, (first, first + 99), 7)
    low, high = course.extremes()
    with np.errstate(divide="ignore"):
        logs = np.log10(numbers)
    for column in range(7):
        part = logs[16 * column : 16 * column + 16]
        np.testing.assert_allclose(high[column, :3], np.nanmax(part, axis=0), rtol=1e-6)
        np.testing.assert_allclose(low[column, :3], np.nanmin(part, axis=0), rtol=1e-6)
    assert np.isnan(high[:, 3]).all(), "a site that never was"


def test_a_run_that_begins_late_has_a_column_for_each_step_too() -> None:
    course = course_of(np.ones((200, 1)), first=100_000, cuts=[90])
    assert (course.stride, len(course), course.axis) == (1, 200, (100_000, 100_199))
    assert [course.share(axis) for axis in (99_000, 100_000, 100_199, 200_000)] == [0.0, 0.5 / 200, 199.5 / 200, 1.0]


def test_a_position_before_the_latest_is_added_to_the_latest_column() -> None:
    course = course_of(np.ones((10, 1)))
    assert len(course) == 10
    course.extend(np.array([3]), np.array([[100.0]]))
    assert course.extremes()[1][:, 0].tolist() == [0.0] * 9 + [2.0]


def test_of_different_neighbours_the_one_farther_from_usual_is_drawn() -> None:
    low, high = np.ones((1, 9), np.float32), np.ones((1, 9), np.float32)
    low[0, 4], high[0, 4] = -1.0, 2.0
    assert most_distinct(low, high)[0].tolist() == [1.0] * 4 + [-1.0] + [1.0] * 4


def test_a_column_without_a_step_shows_the_one_before() -> None:
    course = Downsampling(1, columns=8)
    for axis in (0, 3):
        course.extend(np.array([axis]), np.array([[10.0 ** (axis + 1)]]))
    assert course.extremes()[1][:, 0].tolist() == [1, 1, 1, 4]


def test_numbers_of_any_sign_are_kept_as_they_are_where_that_is_asked() -> None:
    numbers = np.array([[-3.0], [np.nan], [0.0], [2.5]])
    course = course_of(numbers, log=False)
    assert course.extremes()[0][:, 0].tolist() == [-3.0, np.inf, 0.0, 2.5]
    assert course.minimum[0] == -3.0


def test_median_and_extremes_are_those_of_the_tab_where_a_run_is_lost() -> None:
    """Of the finite norms: `last` and the trend say that it was lost."""
    norms = np.array([[1.0], [2.0], [3.0], [np.nan], [np.inf], [np.nan], [np.nan]])
    course, states = course_of(norms), np.where(np.isfinite(norms), 0, NOT_A_NUMBER).astype(np.uint8)
    finite = np.where(np.isfinite(norms), norms, np.nan).astype(np.float32)
    steps = np.arange(len(norms))
    tab = summarised(Matrix(("a",), steps, steps, len(norms), finite, finite, states))
    for kind, expected in {"median": 2.0, "min": 1.0, "max": 3.0}.items():
        found = {"median": course.median, "min": course.minimum, "max": course.maximum}[kind]
        assert (found[0], tab[kind][0]) == (pytest.approx(expected), expected)


def test_sites_that_take_turns_are_all_sampled() -> None:
    steps = np.arange(5_000)
    measured = np.stack([steps % 2 == 0, steps % 2 == 1], axis=1)
    course = course_of(np.tile([3.0, 5.0], (5_000, 1)), measured)
    np.testing.assert_allclose(course.median, [3, 5], rtol=1e-5)
    assert np.isfinite(course.extremes()[0]).all()


def test_sites_that_come_later_have_no_past() -> None:
    course = course_of(np.array([[3.0]]))
    course.grow(2)
    course.extend(np.array([1]), np.array([[4.0, 7.0]]))
    np.testing.assert_allclose(course.minimum, [3, 7], rtol=1e-6)
    assert np.isnan(course.extremes()[0][0, 1])


def test_a_summary_has_the_layers_as_they_were_last() -> None:
    layout = layout_of("a", "b")
    summary = RunSummary()
    more = {1: {"zero_fraction": [0.5, np.nan]}, 2: {"update_ratio": [0.01, 0.01]}}
    records = [
        record_of(layout, step, [1.0 + step, 5.0], codes=[0, step == 3], **more.get(step, {})) for step in range(4)
    ]
    records[1].values["zero_fraction"][0], records[2].values["update_ratio"][0] = 0.25, 0.01
    summary.block(block_of(records[:2]))
    summary.block(block_of(records[2:]))
    assert summary.names == ("total", "a", "b")
    np.testing.assert_array_equal(summary.zeros, [0.25, 0.5, np.nan])
    assert summary.codes.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(summary.grad_norm.last[1:], [4.0, 5.0])
    ratios = summary.courses["update_ratio"]
    assert ratios.axis == (2, 2)
    np.testing.assert_allclose(ratios.last, 0.01)


def test_a_summary_that_sinks_share_takes_each_block_once() -> None:
    summary, block = RunSummary(), block_of([record_of(layout_of("a"), 0, [1.0])])
    summary.block(block)
    summary.block(block)
    summary.block(block_of([record_of(layout_of("a"), 1, [3.0])]))
    assert summary.grad_norm.axis == (0, 1)
    np.testing.assert_allclose(summary.grad_norm.minimum[1], 1.0, rtol=1e-6)
    assert len(summary.grad_norm) == 2
