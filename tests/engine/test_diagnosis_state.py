"""The diagnosis goes on from a state, and one that does not fit leaves it as it was."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from gradwatch.core.alert import Effect, alert_to_dict
from gradwatch.core.record import Layout, Run, Site
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.rules import default_rules
from sink_inputs import alert_of
from synthetic_history import net, noise, record
from synthetic_records import block_of


def diagnosis(layout: Layout) -> Diagnosis:
    made = Diagnosis(default_rules(), (), on_alert=lambda alert: None)
    made.open(Run(layout, ""))
    return made


def saved(records: int = 30) -> tuple[Layout, dict[str, Any]]:
    made, scratch = diagnosis(net(3).layout), net(3)
    for step, row in enumerate(noise(records, layers=3)):
        record(scratch, **row)
        made.judge(block_of([replace(scratch[-1], step=step, axis=step)]))
    return net(3).layout, made.state_dict()


def test_a_run_that_grows_keeps_what_it_was_given() -> None:
    layout, state = saved()
    made = diagnosis(layout)
    made.load_state_dict(state)
    grown = Layout((*layout.sites, Site("new", "layer", "Linear", len(layout), 1, "")))
    made.open(Run(grown, ""))
    assert made.history.steps == list(range(30))
    assert made.history.layout.sites is grown.sites
    assert made.history.layout.order == layout.order
    assert made.verdict(0.0).steps == 30


def test_a_state_of_another_model_changes_nothing() -> None:
    _, state = saved()
    made = diagnosis(net(9).layout)
    with pytest.raises(ValueError, match="another model"):
        made.load_state_dict(state)
    assert len(made.history) == 0
    assert made.verdict(0.0).steps == 0


def test_a_state_that_lacks_a_part_changes_nothing() -> None:
    layout, state = saved()
    made = diagnosis(layout)
    for key in state.keys() - {"version"}:
        with pytest.raises(ValueError, match=f"the state is damaged: KeyError: '{key}'"):
            made.load_state_dict({name: part for name, part in state.items() if name != key})
    assert len(made.history) == 0


def test_a_run_with_records_takes_no_state() -> None:
    layout, state = saved()
    made = diagnosis(layout)
    made.load_state_dict(state)
    with pytest.raises(ValueError, match="30 records of its own already"):
        made.load_state_dict(state)


def test_parameters_once_reached_are_not_called_untrained() -> None:
    layout, state = saved()
    state["reached"].remove("fc1.weight")
    made = diagnosis(layout)
    made.load_state_dict(state)
    assert list(made.verdict(0.0).untrained) == ["fc1.weight"]


def test_effects_of_an_alert_come_back_if_they_are_whole() -> None:
    layout, state = saved()
    effect = Effect("starved", ("fc0",), "fc0", 3, 4)
    state["incidents"]["alerts"] = [alert_to_dict(alert_of("dead", "fc1", effects=(effect,)))]
    made = diagnosis(layout)
    made.load_state_dict(state)
    assert made.incidents.alerts[0].effects == (effect,)
    for change in ({"layer": 3}, {"step": -1}, {"noticed": 0.5}):
        damaged = deepcopy(state)
        damaged["incidents"]["alerts"][0]["effects"][0] |= change
        with pytest.raises(ValueError, match="damaged"):
            diagnosis(layout).load_state_dict(damaged)
