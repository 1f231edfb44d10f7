"""The history against its obvious reference, a list of dicts: bounded, aligned, missing is not non-finite."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.core.block import AFTER_STEP
from gradwatch.core.history import History
from gradwatch.core.record import Layout, Missing, Record, Site
from quick import examples
from synthetic_history import append
from synthetic_records import block_of, record_at


def layout_of(layers: int) -> Layout:
    sites = [Site("total", "total", "", 0, 0, "")]
    for number in range(layers):
        place = len(sites)
        sites.append(Site(f"l{number}", "layer", "Linear", place, 4, ""))
        sites.append(Site(f"l{number}.weight", "parameter", "Linear", place, 4, "float32"))
    return Layout(tuple(sites))


def numbers(layout: Layout, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=len(layout))


def measured(layout: Layout) -> Any:
    return np.zeros(len(layout), dtype=np.int8)


def fill(history: History, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        layout = history.layout
        append(
            history,
            step,
            values={"grad_norm": numbers(layout, step)},
            scalars={"lr": step / 10},
            codes=measured(layout),
        )


ACTIONS = st.lists(st.sampled_from(["append", "append", "append", "amend", "grow", "distrust", "rare"]), max_size=60)


@given(actions=ACTIONS, capacity=st.integers(1, 9))
@examples(150)
def test_equals_a_list(actions: list[str], capacity: int) -> None:
    layout = layout_of(2)
    history = History(layout, capacity=capacity)
    reference: list[dict[str, Any]] = []
    for number, action in enumerate(actions):
        if action in ("append", "rare"):
            values = {"grad_norm": numbers(layout, number)}
            if action == "rare":
                values["weight_norm"] = numbers(layout, number + 1000)
            codes = np.random.default_rng(number).integers(0, 3, len(layout)).astype(np.int8)
            append(
                history,
                number,
                axis=2 * number,
                optimizer=number % 2,
                values=values,
                scalars={"loss": number / 7},
                codes=codes,
            )
            reference.append(
                {"step": number, "values": values, "scalars": {"loss": number / 7}, "codes": codes, "bad": set()}
            )
        elif action == "grow":
            layout = layout_of(len(layout.layers) + 1)
            history.relayout(layout)
        elif reference and action == "amend":
            late = {"update_ratio": numbers(layout, number)}
            history.amend(late, {"skipped": 1.0})
            reference[-1]["values"] = {**reference[-1]["values"], **late}
            reference[-1]["scalars"] = {**reference[-1]["scalars"], "skipped": 1.0}
        elif reference and action == "distrust":
            history.distrust([0, 2])
            reference[-1]["bad"] = {0, 2}
    kept = reference[-capacity:]
    assert len(history) == len(kept)
    assert history.steps == [row["step"] for row in kept]
    for statistic in ("grad_norm", "weight_norm", "update_ratio"):
        if statistic not in history.statistics():
            continue
        for place, site in enumerate(layout.sites):
            expected = [_at(row["values"].get(statistic), place) for row in kept]
            np.testing.assert_array_equal(history.series(statistic, site.name), expected)
        for n in (1, 3, 100):
            window = history.window(statistic, n)
            assert window.shape == (min(n, len(kept)), len(layout))
    for position, row in enumerate(kept):
        record = history[position]
        assert (record.step, record.axis, record.optimizer) == (row["step"], 2 * row["step"], row["step"] % 2)
        assert dict(record.scalars) == row["scalars"]
        assert record.codes[: len(row["codes"])].tolist() == row["codes"].tolist()
        assert (record.codes[len(row["codes"]) :] == Missing.NOT_SAMPLED).all()
        assert history[position - len(kept)].step == row["step"]
    trusted = history.trusted(100)
    for row, trust in zip(kept, trusted, strict=True):
        assert set(np.flatnonzero(~trust).tolist()) == row["bad"]


def _at(values: Any, place: int) -> float:
    return float("nan") if values is None or place >= len(values) else float(values[place])


def test_ten_thousand_records_are_bounded() -> None:
    """Neither the records nor the memory behind them grow beyond the capacity."""
    history = History(layout_of(10), capacity=16)
    fill(history, 100)
    before = history.nbytes
    fill(history, 10_000, start=100)
    assert history.nbytes <= before
    assert len(history) == 16
    assert history.steps == list(range(10_084, 10_100))
    np.testing.assert_array_equal(history.series("lr"), [step / 10 for step in history.steps])
    expected = [numbers(history.layout, step)[0] for step in history.steps]
    np.testing.assert_array_equal(history.series("grad_norm"), expected)


@pytest.mark.parametrize("layers", [1, 400, 20_000])
def test_default_capacity_fits_the_memory(layers: int) -> None:
    history = History(layout_of(layers))
    assert 256 <= history.capacity <= 10_000
    # six statistics of 8 bytes, in twice the capacity at most
    if history.capacity > 256:
        assert history.capacity * 6 * 8 * len(history.layout) <= 65 * 2**20


@pytest.mark.parametrize(
    ("layers", "most"), [(100, 64), (1_000, 64), (4_500, 64), pytest.param(10_000, 141, marks=pytest.mark.slow)]
)
def test_memory_of_a_default_run_is_bounded(layers: int, most: int) -> None:
    """MiB, with two statistics of every record and eighteen that are sampled at one of 46."""
    layout = layout_of(layers)
    history, highest, row = History(layout), 0, np.ones(len(layout))
    always = {"grad_norm": row, "grad_norm_clipped": row}
    sampled = {**always, **{f"sampled_{number}": row for number in range(18)}}
    steps = 3 * history.capacity // 64 * 64
    for first in range(0, steps, 64):
        values = [sampled if step % 46 == 0 else always for step in range(first, first + 64)]
        history.extend(block_of([record_at(first, layout, numbers) for numbers in values]))
        highest = max(highest, history.nbytes)
    assert len(history) == history.capacity
    assert len(history.layout) * 8 * history.capacity * 2 < highest <= most * 2**20


def test_empty_history() -> None:
    history = History(layout_of(1))
    assert len(history) == 0
    assert history.steps == []
    assert history.sites("grad_norm") == ()
    assert history.series("grad_norm").shape == (0,)
    assert history.window("grad_norm", 5).shape == (0, len(history.layout))
    with pytest.raises(IndexError, match="record 0 of a history of 0"):
        history[0]


def test_a_record_is_a_copy() -> None:
    history = History(layout_of(1), capacity=2)
    fill(history, 1)
    record = history[-1]
    before = record.values["grad_norm"].copy()
    fill(history, 10, start=1)
    np.testing.assert_array_equal(record.values["grad_norm"], before)
    series = history.series("grad_norm")
    series[:] = 0
    assert history.series("grad_norm").any()


def test_nonfinite_is_distinguished_from_missing() -> None:
    layout = layout_of(2)
    history = History(layout)
    codes = measured(layout)
    codes[3:] = Missing.FROZEN
    values = np.array([np.nan, np.nan, np.inf, np.nan, np.nan])
    append(history, 0, values={"grad_norm": values}, scalars={}, codes=codes)
    assert history[0].nonfinite == ("l0", "l0.weight")
    assert history[0].missing == {"l1": Missing.FROZEN.reason, "l1.weight": Missing.FROZEN.reason}
    assert history.sites("grad_norm") == ("l0", "l0.weight")


def test_wrong_names_name_the_nearest() -> None:
    history = History(layout_of(3))
    fill(history, 2)
    with pytest.raises(KeyError, match=r"no site named 'l1\.wieght'.*'l1\.weight'"):
        history.series("grad_norm", "l1.wieght")
    with pytest.raises(KeyError, match=r"no statistic named 'grad_nrom'.*grad_norm"):
        history.series("grad_nrom")
    assert history.series("lr", "total").tolist() == history.series("lr").tolist()
    with pytest.raises(KeyError, match="'lr' is a number of the whole step, and has none of 'l1'"):
        history.series("lr", "l1")
    with pytest.raises(IndexError, match="record 2 of a history of 2"):
        history[2]
    for no_name in (range(10**9), 1, b"l1", ["l1"]):
        with pytest.raises(TypeError, match=r"^name=.*expected the name of a site"):
            history.series("grad_norm", no_name)  # type: ignore[arg-type]


def test_before_the_first_fit_every_series_is_empty() -> None:
    assert History(Layout(())).series("grad_norm").shape == (0,)
    assert History(Layout(())).series("grad_norm", "l1").shape == (0,)


def test_every_reason_has_words() -> None:
    reasons = [code.reason for code in Missing]
    assert len(set(reasons)) == len(reasons)


def alike(one: History, other: History) -> None:
    """Asserts that both answer every question in the same way."""
    assert len(one) == len(other)
    assert one.steps == other.steps
    np.testing.assert_equal((one.total, one.opening), (other.total, other.opening))
    assert set(one.statistics()) == set(other.statistics())
    for name in one.statistics():
        np.testing.assert_array_equal(one.series(name), other.series(name))
        np.testing.assert_array_equal(one.window(name, 100), other.window(name, 100))
        np.testing.assert_array_equal(one.scalar(name, 100), other.scalar(name, 100))
        assert one.newest(name) == other.newest(name)
        np.testing.assert_array_equal(one.measured(name, 100), other.measured(name, 100))
        every = np.arange(len(one), 0, -1)
        np.testing.assert_array_equal(one.at(name, every), other.at(name, every))
        (rows, backs), (same, there) = one.samples(name, 100), other.samples(name, 100)
        np.testing.assert_array_equal(rows, same)
        np.testing.assert_array_equal(backs, there)
        window = one.window(name, 100)
        np.testing.assert_array_equal(window, one.at(name, every))
        np.testing.assert_array_equal(window[-backs], rows)
        assert np.isnan(np.delete(window, -backs, axis=0)).all()
    for question in (History.trusted, History.codes, History.optimizers):
        np.testing.assert_array_equal(question(one, 100), question(other, 100))


@given(before=st.integers(0, 30), after=st.integers(0, 30), capacity=st.integers(1, 20))
@examples(60)
def test_goes_on_from_its_state_as_if_uninterrupted(before: int, after: int, capacity: int) -> None:
    through = History(layout_of(2), capacity=capacity)
    fill(through, before)
    if before:
        through.amend({"weight_norm": numbers(through.layout, 1000)}, {"skipped": 1.0})
        through.distrust([0, 3])
    resumed = History(layout_of(2), capacity=capacity)
    resumed.load_state_dict(through.state_dict())
    alike(resumed, through)
    for history in (through, resumed):
        fill(history, after, start=before)
    alike(resumed, through)


def test_its_state_finds_the_sites_by_name() -> None:
    saved = History(layout_of(4), capacity=10)
    fill(saved, 6)
    saved.distrust([2])
    sites = [site._replace(layer=0) for site in reversed(saved.layout.sites[1:])]
    mixed = Layout((saved.layout.sites[0], *sites, Site("new", "layer", "Linear", 9, 4, "")))
    resumed = History(mixed)
    resumed.load_state_dict(saved.state_dict())
    for site in saved.layout.sites:
        np.testing.assert_array_equal(resumed.series("grad_norm", site.name), saved.series("grad_norm", site.name))
    assert np.isnan(resumed.series("grad_norm", "new")).all()
    assert (resumed.codes(6)[:, mixed.find("new")] == Missing.NOT_SAMPLED).all()
    last = resumed.trusted(1)[0]
    assert not last[mixed.find("l0.weight")]
    # the total was one over other sites
    assert not resumed.trusted(6)[:, 0].any()
    assert last[1:].sum() == len(mixed) - 2


def test_a_layer_called_total_is_not_the_total() -> None:
    layout = layout_of(2)
    layout = Layout((*layout.sites[:3], layout.sites[3]._replace(name="total"), layout.sites[4]))
    saved, resumed = History(layout), History(layout)
    fill(saved, 3)
    resumed.load_state_dict(saved.state_dict())
    alike(resumed, saved)


@pytest.mark.parametrize(("layers", "unknown"), [(9, 10), (0, 0)])
def test_a_state_of_another_model_is_declined(layers: int, unknown: int) -> None:
    saved, resumed = History(layout_of(4)), History(layout_of(layers))
    fill(saved, 3)
    with pytest.raises(ValueError, match=rf"another model: it does not know {unknown} of the {2 * layers} layers"):
        resumed.load_state_dict(saved.state_dict())
    assert len(resumed) == 0


@pytest.mark.parametrize("layers", [1, 8])
def test_half_of_the_present_sites_have_to_be_known(layers: int) -> None:
    """What is there and not here does not matter."""
    saved, resumed = History(layout_of(4)), History(layout_of(layers))
    fill(saved, 3)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.steps == saved.steps


def test_its_order_comes_back_with_the_same_layers_only() -> None:
    saved = History(replace(layout_of(3), order=(5, 1, 3)))
    fill(saved, 2)
    same, other = History(layout_of(3)), History(layout_of(4))
    for resumed in (same, other):
        resumed.load_state_dict(saved.state_dict())
    assert same.layout.order == (5, 1, 3)
    assert other.layout.order == ()


def test_the_flow_comes_back_with_the_order_even_if_activations_come_or_go() -> None:
    plain = layout_of(3)
    act = Site("act", "activation", "ReLU", 1, 0, "")
    flow: tuple[tuple[int, int], ...] = ((1, 3), (3, 5), (1, 5), (5, 0))
    with_act = Layout((*plain.sites, act), (1, 3, 5), edges=flow)
    saved, resumed = History(with_act), History(plain)
    fill(saved, 2)
    resumed.load_state_dict(saved.state_dict())
    assert (resumed.layout.order, resumed.layout.edges) == ((1, 3, 5), flow)
    unknown, fresh = History(plain), History(plain)
    fill(unknown, 2)
    fresh.load_state_dict(unknown.state_dict())
    assert fresh.layout.edges is None


def test_a_damaged_flow_gets_no_cycle() -> None:
    saved, resumed = History(replace(layout_of(3), order=(5, 1, 3), edges=((1, 3), (3, 5)))), History(layout_of(3))
    fill(saved, 2)
    state = saved.state_dict()
    state["edges"] = np.array([(1, 3), (3, 5), (5, 1)])
    resumed.load_state_dict(state)
    assert (resumed.layout.order, resumed.layout.edges) == ((1, 3, 5), ((1, 3), (3, 5)))


def made(count: int, *, seed: int, layout: Layout) -> list[Record]:
    """Records with statistics that come and go, some of them after the step."""
    rng, records = np.random.default_rng(seed), []
    for step in range(count):
        values = {"grad_norm": numbers(layout, step)}
        if rng.random() < 0.3:
            values["weight_norm"] = numbers(layout, step + 1000)
        if rng.random() < 0.3:
            values["update_ratio"] = numbers(layout, step + 2000)
        scalars = {"loss": step / 7, **({"skipped": 1.0} if rng.random() < 0.2 else {})}
        codes = rng.integers(0, 3, len(layout)).astype(np.int8)
        codes[0] = Missing.MEASURED
        records.append(record_at(step, layout, values, scalars, codes, axis=2 * step, optimizer=step % 2))
    return records


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), capacity=st.integers(1, 30), seed=st.integers(0, 1000)
)
@examples(100)
def test_blocks_and_views_equal_a_history_of_single_records(sizes: list[int], capacity: int, seed: int) -> None:
    """`until` a record is the history as its rules see it: what is measured after its step is not there yet."""
    layout = layout_of(2)
    records = made(sum(sizes), seed=seed, layout=layout)
    whole, single, end = History(layout, capacity=capacity), History(layout, capacity=capacity), 0
    for size in sizes:
        whole.extend(block_of(records[end : end + size]))
        for place in range(size):
            record = records[end + place]
            late = {name: record.values[name] for name in record.values if name in AFTER_STEP}
            after = {name: number for name, number in record.scalars.items() if name in AFTER_STEP}
            append(
                single,
                record.step,
                axis=record.axis,
                optimizer=record.optimizer,
                values={name: record.values[name] for name in record.values if name not in late},
                scalars={name: number for name, number in record.scalars.items() if name not in after},
                codes=record.codes,
            )
            if size - place <= capacity:
                view = whole.until(place - size)
                alike(view, single)
                assert view[-1].fresh == single[-1].fresh
                assert view[-1].scalars == single[-1].scalars
            single.amend(late, after)
        end += size
        alike(whole, single)
        kept = whole.block(size).records()
        for record, other in zip(kept, records[end - len(kept) : end], strict=True):
            assert (record.step, record.axis, record.optimizer) == (other.step, other.axis, other.optimizer)
            assert record.scalars == other.scalars
            assert record.fresh == frozenset(other.values)
            for name in other.values:
                np.testing.assert_array_equal(record.values[name], other.values[name])


def test_a_view_may_distrust() -> None:
    history = History(layout_of(1))
    history.extend(block_of(made(6, seed=0, layout=history.layout)))
    history.until(-3).distrust([0], back=2)
    assert np.flatnonzero(~history.trusted(6)[:, 0]).tolist() == [2]


def test_a_record_may_be_completed_after_its_block() -> None:
    history = History(layout_of(1))
    history.extend(block_of(made(6, seed=0, layout=history.layout)))
    history.amend({"grad_norm_clipped": numbers(history.layout, 7)}, {"skipped": 1.0})
    assert history[-1].value("grad_norm_clipped") == numbers(history.layout, 7)[0]
    assert history.scalar("skipped", 1) == [1.0]
    assert history.newest("grad_norm_clipped") == 1
    assert not history.until(-1).has("grad_norm_clipped")
    assert np.isnan(history.until(-1).window("grad_norm_clipped", 1)).all()


def test_numbers_that_are_missing_are_no_measurement() -> None:
    layout = layout_of(2)
    history = History(layout)
    assert not history.whole
    fill(history, 2)
    append(
        history,
        2,
        values={"grad_norm": np.full(len(layout), np.nan)},
        scalars={},
        codes=np.full(len(layout), Missing.NO_GRADIENT, dtype=np.int8),
    )
    history.amend({"update_ratio": np.full(len(layout), np.nan)})
    assert history.whole
    assert history.newest("grad_norm") == 2
    assert history.newest("update_ratio") == sys.maxsize
    assert "update_ratio" not in history.statistics()
    resumed = History(history.layout)
    resumed.load_state_dict(history.state_dict())
    assert resumed.statistics() == history.statistics()
