"""What all rules keep to: checked constants, silence on steady runs, and blindness to scale, naming and poison."""

from collections.abc import Iterable, Sequence
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwatch.core.alert import CONSEQUENCES
from gradwatch.core.history import History
from gradwatch.rules import Nonfinite, Spike, default_rules
from quick import examples
from synthetic_history import INF, NAN, judge, judge_rows, layout, net, noise, only, record, silent

RULES = [type(rule) for rule in default_rules()]


@pytest.mark.parametrize("rule", RULES)
def test_constants_are_checked_and_named(rule: type) -> None:
    for field in fields(rule):
        for wrong in (0, -1, NAN, INF, "3", True, None):
            with pytest.raises(ValueError, match=rf"{rule.__name__}\({field.name}=.*{field.name} must be"):
                rule(**{field.name: wrong})
    with pytest.raises(ValueError, match="a whole number from 1; the default is 10"):
        Spike(patience=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a share in \(0, 1\]; the default is 0.5"):
        Spike(whole_share=1.5)


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_values(rule: type) -> None:
    assert rule() == rule()
    with pytest.raises(FrozenInstanceError):
        setattr(rule(), fields(rule)[0].name, 1)


def test_causes_are_rules_in_the_order_in_which_they_explain_each_other() -> None:
    """Of two that may each follow from the other and began together, the first in the table is the cause."""
    names = {rule.name for rule in default_rules()}
    assert set(CONSEQUENCES) <= names
    order = list(CONSEQUENCES)
    for cause, consequences in CONSEQUENCES.items():
        assert consequences <= names - {cause}
        for rule in consequences & set(order):
            mutual = cause in CONSEQUENCES[rule]
            assert mutual or order.index(cause) < order.index(rule), (cause, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tiny_models_and_short_histories_are_no_trouble(rule: type, depth: int) -> None:
    history = net(depth)
    assert not rule()(history)
    assert silent(judge_rows(rule(), history, [{"signals": 1.0, "weights": 1.0, "loss": 1.0}] * 30))


@pytest.mark.parametrize("order", [None, ()])
def test_a_steady_run_is_healthy(order: Sequence[str] | None) -> None:
    history = net(order=order)
    for row in noise(150, signals=1.0, weights=1.0, dex=0.3):
        record(history, **row)
        assert [finding for rule in default_rules() for finding in judge(rule, history) or ()] == []


def illness(seed: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """A random run: a slope with depth, a spike, a dead layer, a NaN, each or not."""
    rng = np.random.default_rng(seed)
    depth = np.arange(len(names))
    slope = rng.choice([0.0, 0.0, -1.5, 1.5]) * depth
    rows = []
    for step in range(45):
        gradients = 10 ** (rng.normal(0, 0.1, len(names)) + slope)
        if rng.random() < 0.05:
            gradients[rng.integers(len(names))] *= rng.choice([1e4, NAN])
        if seed % 3 == 0:
            gradients[seed % len(names)] = 0.0
        sampled = step < 5 or step % 4 == 0
        signals = gradients.copy() if sampled else None
        rows.append(
            {"gradients": gradients, "signals": signals, "weights": 1.0 if sampled else None, "loss": 1.0 + step}
        )
    return rows


def diagnosis(history: History, rows: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """All findings of all rules, without what has a scale."""
    found = []
    for step, row in enumerate(rows):
        record(history, **row)
        for rule in default_rules():
            for finding in judge(rule, history) or ():
                names = frozenset(finding.sites)
                found.append((step, finding.rule, finding.severity, finding.layer, names, round(finding.value, 6)))
    return found


NAMES = [f"fc{i}" for i in range(5)]


@examples(30)
@given(seed=st.integers(0, 10_000), dex=st.integers(-9, 9), permutation=st.permutations(range(5)))
def test_the_scale_of_the_loss_and_the_order_of_definition_change_nothing(
    seed: int, dex: int, permutation: list[int]
) -> None:
    rows = illness(seed, NAMES)
    shuffled = History(layout([NAMES[i] for i in permutation], order=NAMES))
    other = [
        {**row, **{k: row[k][permutation] * 10.0**dex for k in ("gradients", "signals") if row[k] is not None}}
        for row in rows
    ]
    assert diagnosis(shuffled, other) == diagnosis(net(5), rows)


@examples(15)
@given(
    place=st.integers(0, 4),
    poison=st.permutations([NAN, INF, 1e6, -1.0, 0.0]),
    gap=st.integers(0, 30),
)
def test_nothing_blinds_the_rules(place: int, poison: list[float], gap: int) -> None:
    rules, history = (Nonfinite(), Spike()), net(5)
    steady = noise(25, dex=0.05, layers=5)
    one = np.ones(5)
    for value in poison:
        one[place] = abs(value)
        steady += [{"gradients": one.copy(), "loss": NAN}, *noise(gap, dex=0.05, layers=5)]
    for row in steady:
        record(history, **row)
        for rule in rules:
            judge(rule, history)
    one[place] = 100.0
    record(history, one)
    if not (found := judge(Spike(), history)):
        record(history, np.ones(5))
        found = Spike()(history)
    assert f"fc{place}" in only(found).sites
