"""The rows of a map of layers by steps: which layers share one, what it shows, and which rows have room for a name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.median import lower_median
from gradwatch.sinks.downsampling import Logs, extremes_of

MIN_DIFFERENCE = 1.0
"""Decades between the extremes of a column from which on the outlying one is drawn. Judgement: less is noise."""


def rows_of(low: Logs, high: Logs, most: int, *, first: Sequence[int] = ()) -> tuple[Logs, NDArray[np.intp]]:
    """One number for each pair of `low` and `high`, [layers, columns], in at most `most` rows, and the first layer of
    each row. Neighbours share a row; one of the layers `first` has it for itself.
    """
    lows, highs, begins = extremes_of(low, high, most)
    shown = most_distinct(lows, highs)
    for layer in reversed(first):
        shown[np.searchsorted(begins, layer, side="right") - 1] = high[layer]
    return shown, begins


def most_distinct(low: Logs, high: Logs) -> Logs:
    """The middle of each pair, or where they differ by `MIN_DIFFERENCE` the one farther from its row's median, so that
    spikes remain visible. Infinite numbers take precedence.
    """
    with np.errstate(invalid="ignore"):
        middle = (low + high) / 2
        usual = lower_median(np.where(np.isfinite(middle), middle, np.nan).T)[:, None]
        farther = np.where(high - usual >= usual - low, high, low)
        shown = np.where(high - low > MIN_DIFFERENCE, farther, middle)
    return np.where(np.isposinf(high), np.inf, np.where(np.isneginf(low), -np.inf, shown))


def apart(rows: Iterable[int], middles: NDArray[Any], distance: float) -> list[int]:
    """Those of `rows`, earlier ones first, of which the `middles` are `distance` apart: their names do not overlap."""
    chosen, at = list[int](), middles.tolist()
    for row in rows:
        if all(abs(at[row] - at[other]) >= distance for other in chosen):
            chosen.append(row)
    return chosen
