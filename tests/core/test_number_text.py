"""Numbers in sentences."""

from __future__ import annotations

import math

import pytest

from gradwatch.core.number_text import number_text


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (0.0341, 2, "0.034"),
        (436.2, 2, "440"),
        (1022.0, 3, "1020"),
        (99.7, 2, "100"),
        (-2383.0, 3, "-2380"),
        (99_999.0, 2, "1e5"),
        (5.46e7, 2, "5.5e7"),
        (1e-9, 2, "1e-9"),
        (1.5e-10, 2, "1.5e-10"),
        (0.0, 2, "0"),
        (math.inf, 2, "inf"),
        (math.nan, 2, "nan"),
    ],
)
def test_a_number_is_short(number: float, digits: int, text: str) -> None:
    assert number_text(number, digits) == text
