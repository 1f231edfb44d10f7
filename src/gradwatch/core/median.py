"""The medians of each of many columns, without what is not a number: `numpy.nanmedian` takes minutes for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Floats

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2), of a normal distribution."""


def median(numbers: Floats) -> Floats:
    """As `numpy.nanmedian` over axis 0: NaN sorts to the end. NaN where there is no number."""
    ordered, count = np.sort(numbers, axis=0), np.count_nonzero(~np.isnan(numbers), axis=0, keepdims=True)
    low, high = (np.take_along_axis(ordered, places, axis=0)[0] for places in ((count - 1) // 2, count // 2))
    return np.asarray((low + high) / 2)


def lower_median(numbers: NDArray[Any]) -> Any:
    """The median over axis 0, the lower of the two in the middle, so that it is one of `numbers`. NaN where there is no
    number.
    """
    ordered, count = np.sort(numbers, axis=0), np.count_nonzero(~np.isnan(numbers), axis=0, keepdims=True)
    return np.take_along_axis(ordered, (count - 1) // 2, axis=0)[0]
