"""What is read of a file becomes values of the types that are expected, or one line that says where and what it is."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from gradwatch.core.alert import Alert, Effect, Severity, Verdict, alert_to_dict
from gradwatch.core.typed_values import ITEMS_MAX, STEP_MAX, TEXT_MAX, InvalidError, moment, typed

EFFECT = Effect("dead", ("b",), "b", 4, 5)
ALERT = Alert("spike", Severity.ERROR, "a", ("a", "b"), 3, 4, math.inf, 1.0, "It rose.", "A lower rate.", 9, (EFFECT,))


def test_an_alert_comes_back() -> None:
    assert typed(Alert, alert_to_dict(ALERT)) == ALERT
    assert typed(Alert, {**alert_to_dict(ALERT), "value": "inf", "of a later version": 1}) == ALERT
    few = alert_to_dict(ALERT)
    del few["closed_step"]
    assert typed(Alert, few).closed_step is None, "fields with a default need not be there"


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (int, STEP_MAX, STEP_MAX),
        (float, 3, 3.0),
        (float, "-inf", -math.inf),
        (str, "\ud800" + TEXT_MAX * "x", "\\ud800" + (TEXT_MAX - 1) * "x"),
        (int | None, None, None),
        ([str], ["a"], ["a"]),
        ({str: [int]}, {"a": [1]}, {"a": [1]}),
        ({"a": int}, {"a": 1, "b": 2}, {"a": 1}),
        (moment, 1, 1.0),
    ],
)
def test_values_of_each_kind(kind: Any, value: Any, found: Any) -> None:
    assert typed(kind, value) == found
    assert type(typed(kind, value)) is type(found)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (int, True, "x=True: expected a whole number from 0"),
        (int, -1, "x=-1: expected a whole number"),
        (int, 10**400, "x=1e400: expected a whole number"),
        (float, "1", "x='1': expected a number"),
        (float, 10**400, "x=1e400: expected a number"),
        (str, b"", "x=b'': expected a text"),
        (Severity, "loud", "x='loud': expected one of notice, warning, error"),
        (Severity, [], "x=[]: expected one of"),
        ([int], (1,), "x=(1,): expected a list"),
        ([int], [0] * (ITEMS_MAX + 1), "expected a list of at most 262,144"),
        ([int], [1, None], "x[1]=None: expected a whole number"),
        ({str: int}, {1: 1}, "x=1: expected a text"),
        ({str: int}, {"a" * 99: None}, f"x['{'a' * 59}]=None: expected a whole number"),
        ({"a": {"b": int}}, {"a": {}}, "x.a.b is not there"),
        (Verdict, [], "x=[]: expected an object"),
        (Alert, {**alert_to_dict(ALERT), "effects": [3]}, "x.effects[0]=3: expected an object"),
        (moment, 1e300, "x=1e+300: expected seconds since 1970"),
        (moment, math.nan, "x=nan: expected seconds since 1970"),
    ],
)
def test_anything_else_is_said_in_a_line(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(InvalidError, match=re.escape(said)) as error:
        typed(kind, value, "x")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
