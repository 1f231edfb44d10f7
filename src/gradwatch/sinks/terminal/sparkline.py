"""Draws a series of numbers as one line of characters."""

from __future__ import annotations

import numpy as np

from gradwatch.sinks.downsampling import Logs, extremes_of

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-~=+*#"

MIN_BAR_DECADES = 1.0
"""Decades between the lowest and the highest bar, at least, so that small variation looks small. Judgement."""


def sparkline(low: Logs, high: Logs, *, width: int, ascii_only: bool = False) -> str:
    """At most `width` characters for a series given by its lowest and highest log10 numbers, shape [n] each.

    The scale is that of the series. Each character draws its lowest or highest number, whichever is farther from the
    median of the series. '0' is -inf, 'x' is +inf, ' ' is NaN.
    """
    if not (width and len(low)):
        return ""
    low, high, _ = extremes_of(low, high, width)
    ordered = np.sort(np.concatenate([low, high]))
    ordered = ordered[np.isfinite(ordered)] if np.isfinite(ordered).any() else np.zeros(1)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    least, most = ordered[0], ordered[-1]
    with np.errstate(invalid="ignore"):
        drawn = np.where(high - middle >= middle - low, high, low)
    drawn = np.where(np.isposinf(high), np.inf, np.where(np.isneginf(low), -np.inf, drawn))
    span = max(MIN_BAR_DECADES, most - least)
    floor = (least + most - span) / 2
    bars = ASCII_BARS if ascii_only else BARS
    return "".join(_character(number, floor, span, bars) for number in drawn.tolist())


def _character(number: float, floor: float, span: float, bars: str) -> str:
    if number != number:
        return " "
    if abs(number) == np.inf:
        return "x" if number > 0 else "0"
    return bars[min(len(bars) - 1, int((number - floor) / span * len(bars)))]
