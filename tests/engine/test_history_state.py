"""A history in a checkpoint: loadable without numpy, bounded, and thinned out so that rules find the same."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradwatch.engine.history_state
from gradwatch.core.alert import Alert
from gradwatch.core.history import OPENING, History
from gradwatch.core.record import Layout, Missing, Record, Run, Site
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.history_state import NEWEST_RECORDS, STATE_BYTES, packed, unpacked
from gradwatch.engine.joined_arrays import join_arrays, split_arrays
from gradwatch.measure.device_buffer import ROWS
from gradwatch.measure.modules.sampled_step import LayerFlow
from gradwatch.rules import default_rules
from quick import examples
from synthetic_history import append, layout, net, noise, record
from synthetic_records import block_of

EXPERTS = [f"experts.{i}" for i in range(6)]
SHAPE = layout(EXPERTS, order=EXPERTS[:-1])
"""The last expert was never seen to run, its siblings were."""

Rows = list[dict[str, Any]]
NAN, INF = float("nan"), float("inf")


def through_a_file(state: Any) -> tuple[Any, int]:
    """`state` as Lightning saves and loads it, and its size in bytes."""
    file = io.BytesIO()
    torch.save(state, file)
    size = file.tell()
    file.seek(0)
    return torch.load(file, weights_only=True), size


def restored(history: History) -> History:
    fresh = History(Layout(history.layout.sites, modules=history.layout.modules), capacity=history.capacity)
    fresh.load_state_dict(unpacked(split_arrays(through_a_file(join_arrays(packed(history.state_dict())))[0])))
    return fresh


ROW = st.fixed_dictionaries(
    {"gradients": st.sampled_from([0.0, 1.0, 0.3, 1e-44, 1e-60, 1e100, INF, NAN])},
    optional={
        "signals": st.sampled_from([0.0, 2.5, 1e-50]),
        "weights": st.just(4.0),
        "codes": st.sampled_from([{"fc1": Missing.NO_GRADIENT}, {"fc2": Missing.FROZEN}]),
        "optimizer": st.sampled_from([0, 1]),
        "loss": st.floats(-1, 1),
        "skipped": st.just(1.0),
    },
)


@given(rows=st.lists(ROW, max_size=12))
@examples(80)
def test_all_of_a_short_history_comes_back(rows: Rows) -> None:
    """To float32's seven digits, and no number becomes zero, infinite or missing that was not."""
    history = net(3)
    history.relayout(replace(history.layout, edges=((1, 2), (2, 3), (1, 3), (3, 0))))
    for row in rows:
        record(history, **row)
    if rows:
        history.distrust([0, 2])
    fresh = restored(history)
    assert fresh.steps == history.steps
    assert fresh.layout.order == history.layout.order
    assert fresh.layout.edges == history.layout.edges
    assert set(fresh.statistics()) == set(history.statistics())
    assert fresh.opening == history.opening
    for question in (History.codes, History.trusted, History.optimizers):
        np.testing.assert_array_equal(question(fresh, 99), question(history, 99))
    for name in history.statistics():
        assert fresh.newest(name) == history.newest(name)
        np.testing.assert_array_equal(fresh.series(name), history.series(name))  # totals are exact
    for name in ("grad_norm", "signal_norm", "weight_norm"):
        here, there = fresh.window(name, 99), history.window(name, 99)
        for test in (np.isnan, np.isfinite, np.sign):
            np.testing.assert_array_equal(test(here), test(there))
        ordinary = (np.abs(there) > 1e-37) & (np.abs(there) < 1e38)
        np.testing.assert_allclose(here[ordinary], there[ordinary], rtol=1e-7)


@pytest.mark.parametrize(("layers", "records", "mib"), [(2, 12_000, 1.5), (50, 4_000, 1.5), (300, 1_000, 2)])
def test_a_state_is_bounded(layers: int, records: int, mib: float) -> None:
    history = History(layout([f"blocks.{i}.fc" for i in range(layers)]))
    rng = np.random.default_rng(0)
    codes = np.zeros(len(history.layout), dtype=np.int8)
    for step in range(records):
        norms = rng.uniform(1, 2, len(history.layout))
        values = {"grad_norm": norms, "grad_norm_clipped": norms}
        if step % 25 == 0:
            values |= {"weight_norm": norms, "update_ratio": norms, "zero_fraction": norms}
        append(history, step, values=values, scalars=dict.fromkeys("abcdefg", 1.0), codes=codes)
    state, size = through_a_file(join_arrays(packed(history.state_dict())))
    assert size < mib * 2**20
    fresh = History(history.layout)
    fresh.load_state_dict(unpacked(split_arrays(state)))
    assert fresh.steps == history.steps
    np.testing.assert_array_equal(fresh.series("grad_norm"), history.series("grad_norm"))
    there = ~np.isnan(fresh.series("grad_norm", history.layout.sites[-1].name))
    assert there[:OPENING].all()
    assert there[-NEWEST_RECORDS:].all()
    if layers > 2:
        assert size > 0.9 * STATE_BYTES, "room is left for more records"
        assert not there.all()
    in_the_middle = fresh[int(np.flatnonzero(~there)[0])] if not there.all() else fresh[0]
    assert in_the_middle.nonfinite == (), "what is not kept is not taken for non-finite"


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for more than what is always whole."""
    monkeypatch.setattr(gradwatch.engine.history_state, "STATE_BYTES", 0)


def records_of(rows: Rows) -> list[Record]:
    """What a training of `rows` gives."""
    scratch, records = History(SHAPE, capacity=2), []
    for step, row in enumerate(rows):
        record(scratch, **row)
        made = scratch[-1]
        values = {name: made.values[name] for name in made.values if name == "grad_norm" or name[:-5] + "s" in row}
        records.append(replace(made, step=step, axis=step, values=values))
    return records


def diagnosed(
    records: list[Record], stops: tuple[int, ...] = (), *, states: dict[int, Any] | None = None, first: int = 0
) -> tuple[Alert, ...]:
    """The alerts of a run of `records`, which is stopped before each of `stops` and resumed from its state.

    `states`: gets the state before each step of its keys; with a `first` step, has the state to begin there with.
    """

    def fresh() -> Diagnosis:
        made = Diagnosis(default_rules(), (), on_alert=lambda alert: None)
        made.open(Run(Layout(SHAPE.sites, modules=SHAPE.modules), ""))
        return made

    diagnosis, states = fresh(), {} if states is None else states
    if first:
        diagnosis.load_state_dict(states[first])
    else:
        diagnosis.learn_flow(LayerFlow(SHAPE.order))
    block: list[Record] = []
    for one in records[first:]:
        block.append(one)
        after = one.step + 1
        saved = after in stops or (after in states and not first)
        if saved or len(block) == ROWS or after == len(records):
            diagnosis.judge(block_of(block))
            block.clear()
        if saved:
            state, _ = through_a_file(diagnosis.state_dict())
            if after in states:
                states[after] = state
            else:
                diagnosis = fresh()
                diagnosis.load_state_dict(state)
    assert not diagnosis.notes
    return diagnosis.incidents.alerts


def spiky() -> Rows:
    rows = noise(900, dex=0.02)
    for step in (300, 301, 560, 890):
        rows[step] = {**rows[step], "gradients": np.full(6, 80.0)}
    return rows


def in_turn() -> Rows:
    """Two optimizers, each with half of the layers."""
    others = [{f"experts.{i}": Missing.OTHER_OPTIMIZER for i in places} for places in ((3, 4, 5), (0, 1, 2))]
    rows = [{**row, "optimizer": step % 2, "codes": others[step % 2]} for step, row in enumerate(noise(700, dex=0.02))]
    rows[650]["gradients"] *= 80
    return rows


def rarely_sampled() -> Rows:
    """Signals every 300 records, sound at first: three faint ones in a row are there at record 900."""
    sound, faint = np.ones(6), np.array([1e-6, 1e-5, 1e-3, 1.0, 1.0, 1.0])
    rows = noise(1250)
    for step in range(0, 1250, 300):
        rows[step]["signals"] = faint if step else sound
    return rows


def never_reached() -> Rows:
    """One of six experts: an alert after 1,000 records."""
    return [{**row, "codes": {"experts.5": Missing.NO_GRADIENT}} for row in noise(1150)]


def once_reached() -> Rows:
    rows = never_reached()[:1100]
    rows[120] = noise(1)[0]
    return rows


def once_alive() -> Rows:
    """A layer that rests from record 150 on: exactly zero as far back as 1,000 records only at the end."""
    rows = noise(1200)
    for row in rows[150:]:
        row["gradients"][2] = 0.0
    return rows


def grown() -> Rows:
    rows = noise(700)
    for step, row in enumerate(rows):
        row["gradients"] *= 10 ** (step / 150)
        row["loss"] = 1.0 + step / 100
    return rows


def lost() -> Rows:
    rows = noise(500)
    for row in rows[400:]:
        row |= {"gradients": np.full(6, NAN), "loss": NAN}
    rows[380]["gradients"] *= 100
    return rows


RUNS: dict[str, tuple[Any, set[str], tuple[int, ...]]] = {
    "spiky": (spiky, {"spike"}, (250, 301, 310, 561, 600, 889)),
    "in_turn": (in_turn, {"spike"}, (300, 649, 651)),
    "rarely_sampled": (rarely_sampled, {"vanishing"}, (299, 590, 890, 910)),
    "never_reached": (never_reached, {"disconnected"}, (500, 998, 1000, 1040)),
    "once_reached": (once_reached, set(), (600, 1090)),
    "once_alive": (once_alive, {"disconnected"}, (400, 1100, 1149, 1190)),
    "grown": (grown, {"exploding"}, (200, 460, 600)),
    "lost": (lost, {"nonfinite", "spike"}, (390, 401, 450)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_raises_the_same_alerts(name: str) -> None:
    """Stopped before, within and after the incident, however little of the history is kept."""
    made, rules, stops = RUNS[name]
    records, states = records_of(made()), dict.fromkeys(stops)
    uninterrupted = diagnosed(records, states=states)
    assert {alert.rule for alert in uninterrupted} == rules, uninterrupted
    for stop in (*stops, stops):
        resumed = diagnosed(records, stop) if stop is stops else diagnosed(records, states=states, first=stop)
        assert list(map(incident, resumed)) == list(map(incident, uninterrupted)), stop
        for here, there in zip(resumed, uninterrupted, strict=True):
            if here.rule != "disconnected":  # whose value is a count of whole records
                np.testing.assert_allclose(here.value, there.value, rtol=1e-6)


def incident(alert: Alert) -> tuple[Any, ...]:
    return alert.rule, alert.severity, alert.layer, alert.sites, alert.step, alert.closed_step, alert.times


DAMAGED: dict[str, Any] = {
    "no sites": lambda state: state.pop("sites"),
    "no records": lambda state: state.pop("keys"),
    "fewer keys": lambda state: state.update(keys=state["keys"][:-1]),
    "a step before the first": lambda state: state.update(keys=state["keys"] - 1),
    "flat keys": lambda state: state.update(keys=state["keys"].reshape(-1)),
    "fewer sites": lambda state: state.update(sites=state["sites"][:-1]),
    "short loss": lambda state: state["scalars"].update(loss=np.zeros(2)),
    "no column": lambda state: state["columns"]["grad_norm"].pop("values"),
    "rows beyond": lambda state: state["columns"]["grad_norm"].update(at=np.arange(20) + 99),
    "unknown reason": lambda state: state["codes"].update(rows=np.full((1, 13), 9, dtype=np.int8)),
    "unknown layer": lambda state: state.update(order=["fc99"]),
    "flow of strangers": lambda state: state.update(edges=np.array([[1, 99]])),
    "odd opening": lambda state: state.update(opening=[1.0]),
    "text": lambda state: state.update(codes="none"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_refused(name: str) -> None:
    history = net(4)
    for row in noise(20, layers=4):
        record(history, **row)
    state = packed(history.state_dict())
    assert len(unpacked(state)["keys"]) == 20
    DAMAGED[name](state)
    with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
        unpacked(state)


def test_a_state_that_lacks_a_part_is_refused() -> None:
    history = net(4)
    for row in noise(20, layers=4):
        record(history, **row)
    state = packed(history.state_dict())
    for key in state:
        with pytest.raises(KeyError, match=key):
            unpacked({name: part for name, part in state.items() if name != key})


def test_a_state_holds_copies() -> None:
    history = net(2)
    record(history, 1.0, loss=2.0)
    state = join_arrays(packed(history.state_dict()))
    history.amend({"grad_norm": np.full(len(history.layout), 7.0)}, {"loss": 7.0})
    history.distrust([0])
    found = unpacked(split_arrays(state))
    assert found["scalars"]["loss"].tolist() == [2.0]
    assert found["columns"]["grad_norm"]["rows"][0, 1] == 1.0
    assert found["trusted"].all()


def test_a_run_that_measures_no_activations_any_more_keeps_its_order() -> None:
    layers = layout(EXPERTS, order=EXPERTS)
    act = Site("act", "activation", "ReLU", 1, 0, "float32")
    history = History(replace(layers, sites=(*layers.sites, act)))
    record(history, 1.0)
    after = History(layout(EXPERTS, order=()))
    after.load_state_dict(unpacked(packed(history.state_dict())))
    assert after.layout.names(after.layout.order) == tuple(EXPERTS)
