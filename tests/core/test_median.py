"""The medians of many columns beside those of each column's sorted numbers."""

import math
from statistics import median as median_of
from statistics import median_low

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from gradwatch.core.median import lower_median, median

NUMBERS = st.one_of(st.floats(-100, 100), st.just(math.nan), st.just(0.0))


@given(arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=NUMBERS))
def test_the_medians_are_those_of_the_numbers_in_each_column(numbers: np.ndarray) -> None:
    for ours, plain in ((median, median_of), (lower_median, median_low)):
        columns = [[number for number in column if not math.isnan(number)] for column in numbers.T.tolist()]
        np.testing.assert_array_equal(ours(numbers), [plain(column) if column else math.nan for column in columns])
        assert all(ours(column).shape == () for column in numbers.T)
