"""A series of numbers as an SVG line of the height of a text line."""

from __future__ import annotations

import numpy as np

from gradwatch.runs.pages import figure
from gradwatch.sinks.downsampling import Logs, extremes_of

WIDTH, HEIGHT = 64, 18
"""Points, and units of height. Judgement."""

MIN_DECADES = 1.0
"""Decades from bottom to top, at least. Judgement."""


def sparkline(low: Logs, high: Logs) -> str:
    """SVG for the extremes of a series, log10, oldest first, shape [n] each, on its own scale.

    A light band between them, a line along the higher; red below it where something is not finite, grey where all is
    zero.
    """
    if np.isnan(high).all():  # or there is none
        return ""
    low, high, _ = extremes_of(low, high, WIDTH)
    points = len(high)
    finite = np.concatenate([low[np.isfinite(low)], high[np.isfinite(high)]])
    least, most = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    span = max(MIN_DECADES, most - least)
    floor = (least + most - span) / 2

    def heights(logs: Logs) -> list[int | None]:
        share = (np.where(np.isfinite(logs), logs, np.nan) - floor) / span
        return [None if y != y else round(HEIGHT - 1 - y * (HEIGHT - 2)) for y in share.tolist()]

    stretch = (WIDTH - 1) / max(1, points - 1)
    xs = [round(place * stretch) for place in range(points)]
    ticks = [
        (kind, "".join(f"M{xs[place]} {HEIGHT}v-3" for place in np.flatnonzero(where)))
        for kind, where in (("x", np.isposinf(high)), ("z", np.isneginf(high)))
        if where.any()
    ]
    highs = heights(high)
    line, band = _line(xs, highs), _band(xs, heights(low), highs)
    return figure("sparkline", width=WIDTH + 2, height=HEIGHT, band=band, line=line, ticks=ticks)


def _line(xs: list[int], ys: list[int | None]) -> str:
    """A path that begins again after each gap; a point alone is a dot."""
    points = zip(xs, ys, [None, *ys[:-1]], [*ys[1:], None], strict=True)
    return "".join(
        f"{'M' if before is None else 'L'}{x} {y}" + "h1" * (before is after is None)
        for x, y, before, after in points
        if y is not None
    )


def _band(xs: list[int], low: list[int | None], high: list[int | None]) -> str:
    """The area between the two, where it is worth a look."""
    places = [(x, a, b) for x, a, b in zip(xs, low, high, strict=True) if a is not None and b is not None and a - b > 1]
    return "".join(f"M{x} {b}V{a}" for x, a, b in places)
