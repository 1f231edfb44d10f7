"""`suspects` never misses: wherever a rule finds something, that row is among those it suspects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.core.history import History
from gradwatch.core.record import Missing
from gradwatch.rules import default_rules
from gradwatch.rules.evidence.recent_rows import RecentRows
from quick import cases, examples
from recorded_runs import RUNS, recorded
from synthetic_history import INF, NAN, net, record

RULES = default_rules()


def missed(rule: Any, history: History, count: int) -> list[int]:
    """The last `count` rows at which the rule finds something that is not suspected."""
    suspected = rule.suspects(RecentRows(history, history.block(count)))
    assert suspected.shape == (count,)
    assert suspected.dtype == bool
    return [
        history.steps[row - count] for row in range(count) if not suspected[row] and rule(history.until(row - count))
    ]


@pytest.mark.parametrize("name", cases(RUNS, ("spikes", "dead", "vanishing", "two optimizers")))
def test_no_row_of_a_training_is_missed(name: str) -> None:
    run, history = recorded(name), None
    for block in run.blocks(lambda: 32):
        history = history or History(block.layout)
        history.relayout(block.layout)
        history.extend(block)
        for rule in RULES:
            assert missed(rule, history, len(block)) == [], rule.name


NORM = st.one_of(st.sampled_from([0.0, 1.0, 1e-7, 3e5, 20.0, INF, NAN]), st.floats(1e-3, 1e3))
ROW = st.fixed_dictionaries(
    {"gradients": st.one_of(NORM, st.lists(NORM, min_size=4, max_size=4))},
    optional={
        "signals": st.lists(st.sampled_from([0.0, 1.0, 2e3, 1e-5]), min_size=4, max_size=4),
        "weights": st.sampled_from([0.5, 5.0, 50.0]),
        "codes": st.sampled_from(
            [{"fc1": Missing.NO_GRADIENT}, {"fc2": Missing.FROZEN}, {"fc0.bias": Missing.NO_OPTIMIZER}]
        ),
        "optimizer": st.sampled_from([0, 0, 0, 1]),
        "loss": st.sampled_from([1.0, 1.0, 1.5, 0.01, 40.0, -1e3, INF, NAN]),
        "loss_nan": st.just(1.0),
        "lr": st.sampled_from([0.1, 0.1, 0.0, 5.0]),
        "stale": st.sampled_from([0.0, 1.0]),
        "scaled": st.just(1.0),
    },
)
UPDATES = st.one_of(st.none(), st.lists(st.sampled_from([0.0, 1e-9, 1e-3, 2.0, 5.0]), min_size=4, max_size=4))
STEADY = {"gradients": 1.0, "signals": [1.0] * 4, "weights": 5.0, "loss": 1.0, "lr": 0.1}


@given(
    begin=st.integers(0, 60),
    rows=st.lists(st.tuples(ROW, UPDATES, st.integers(1, 12)), min_size=1, max_size=12),
    capacity=st.sampled_from([300, 300, 40]),
    distrusted=st.lists(st.integers(1, 30), max_size=3),
)
@examples(150)
def test_no_row_is_missed(
    begin: int, rows: list[tuple[dict, list | None, int]], capacity: int, distrusted: list[int]
) -> None:
    """Each row several times over, as most faults have to last."""
    history = net(4)
    history.capacity = capacity
    for row, updates, times in [(STEADY, [1e-3] * 4, begin), *rows]:
        for _ in range(times):
            record(history, **row)
            if updates is not None:
                line = np.full(len(history.layout), NAN)
                line[history.layout.layers] = updates
                line[history.layout.parameters] = line[history.layout.owners]
                line[0] = max(updates)
                history.amend({"update_ratio": line, "grad_norm_clipped": line}, {"skipped": 1.0})
    for back in distrusted:
        if back <= len(history):
            history.distrust([0, 2], back=back)
    for rule in RULES:
        assert missed(rule, history, min(len(history), 40)) == [], rule.name


def test_a_first_loss_that_is_infinite_hides_no_later_one() -> None:
    """Of two optimizers, where the loss of one is infinite at its first record that is kept."""
    history = net(4)
    record(history, gradients=1.0, optimizer=1)
    for loss, gradients in [(INF, 1.0), *[(1.0, 1.0)] * 20, *[(40.0, 20.0)] * 8]:
        record(history, gradients=gradients, loss=loss)
    rule = next(rule for rule in RULES if rule.name == "divergence")
    assert rule(history)
    assert missed(rule, history, 20) == []
