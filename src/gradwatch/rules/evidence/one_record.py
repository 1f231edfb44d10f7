"""The numbers of one record, NaN where they are not known."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import Floats


def number_of(history: History, name: str, *, back: int = 1) -> float:
    """A number of the whole step (`loss`, `lr`, ...) at the record `back` from the end."""
    numbers = history.scalar(name, back)
    return float("nan") if numbers is None else float(numbers[0])


def row_of(history: History, statistic: str, *, back: int = 1) -> Floats:
    """`statistic` at all sites at the record `back` from the end: shape [sites]."""
    row: Floats = history.at(statistic, np.array([back - 1]))[0]
    return row
