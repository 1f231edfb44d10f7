"""Numbers of a record on their way to a file."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis.extra.numpy import arrays

from gradwatch.core.record import as_float32
from sink_inputs import NORMS


@given(arrays(float, (4, 5), elements=NORMS), arrays(bool, (4, 5)))
def test_rounding_to_float32_makes_no_zero_and_no_infinity(numbers: Any, negative: Any) -> None:
    numbers = np.where(negative, -numbers, numbers)
    rounded = as_float32(numbers)
    assert rounded.dtype == np.float32
    np.testing.assert_array_equal(np.isfinite(rounded), np.isfinite(numbers))
    np.testing.assert_array_equal(np.sign(rounded), np.sign(numbers))
    fits = (abs(numbers) > 1e-37) & (abs(numbers) < 1e38)
    np.testing.assert_array_equal(rounded[fits], numbers[fits].astype(np.float32))
