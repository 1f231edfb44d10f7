"""The mode matrix: in every way to train, numbers are the float64 oracle's, and training is as without GradWatch."""

from __future__ import annotations

import math
from functools import cache

import pytest

import quick
from modes import MODES, Result, run


@cache
def result_of(name: str) -> Result:
    return run(MODES[name])


@pytest.mark.parametrize("name", quick.cases(MODES, quick.MODES))
def test_mode(name: str) -> None:
    result = result_of(name)
    assert result.notes == ()
    assert result.alerts == ()
    assert len(result.records) >= 3
    assert result.error <= 1e-5
    assert result.neutral
    assert result.hooks == []
    assert result.graphs[0] == result.graphs[1]


@pytest.mark.parametrize("name", quick.cases([name for name in MODES if name.startswith("16-mixed")], quick.MODES))
def test_steps_that_the_scaler_skips_are_counted(name: str) -> None:
    """By the scaler, or by a fused optimizer inside its own step."""
    result = result_of(name)
    skipped = [bool(record.scalars.get("skipped")) for record in result.records]
    overflowed = [not math.isfinite(truth["total"]) for truth in result.measured]
    assert skipped == overflowed
    assert any(skipped)
    assert not all(skipped)
