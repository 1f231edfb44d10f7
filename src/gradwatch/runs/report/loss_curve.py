"""The loss over the steps, below the heatmap and on its axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwatch.core.number_text import number_text
from gradwatch.runs.pages import figure
from gradwatch.runs.report.heatmap import names_width
from gradwatch.sinks.downsampling import Downsampling

HEIGHT = 100
"""Units of height."""

SHOWN_SHARE = 0.995
"""Share of the highest values that are inside the picture, so that one spike does not flatten the rest. Judgement."""


def path_of(loss: Downsampling, beside: Downsampling) -> tuple[str, str]:
    """The curve as an SVG path over the columns of `beside`, `HEIGHT` high, and its extent in words; two empty texts
    where nothing of it is finite. A number alone is as wide as its column.
    """
    low, high = (numbers[:, 0].astype(np.float64) for numbers in loss.extremes())
    finite = np.isfinite(high) & np.isfinite(low)
    if not finite.any():
        return "", ""
    least, most = float(loss.minimum[0]), float(loss.maximum[0])  # columns with what is not finite are not drawn
    top = float(np.quantile(high[finite], SHOWN_SHARE, method="higher"))
    span = (top - least) or 1.0
    width = loss.stride / beside.stride
    x = (loss.axis[0] - beside.axis[0]) / beside.stride + (np.arange(len(high)) + 0.5) * width
    highs = np.clip(HEIGHT * (1 - (high - least) / span), 0, HEIGHT)
    lows = np.clip(HEIGHT * (1 - (low - least) / span), 0, HEIGHT)
    before, after = np.append(False, finite[:-1]), np.append(finite[1:], False)
    path = ""
    for place in np.flatnonzero(finite).tolist():
        at, upper, lower = x[place], highs[place], lows[place]
        path += f"{'L' if before[place] else 'M'}{at:.1f} {upper:.1f}"
        path += f"V{lower:.1f}" if lower > upper else ""
        if not before[place] and not after[place]:
            path += f"M{at - width / 2:.1f} {upper:.1f}h{width:.1f}"
    extent = f"lowest {number_text(least, 4)}, highest {number_text(most, 4)}" + (
        f", drawn up to {number_text(top, 4)}" if top < most else ""
    )
    return path, extent + "; not finite where there is no line" * bool(np.isinf(high).any())


def curve(loss: Downsampling, beside: Downsampling, names: Sequence[str]) -> str:
    """HTML of one number per step, kept as it is; `beside`: on whose axis it is drawn, next to `names`."""
    path, extent = path_of(loss, beside)
    if not path:
        return ""
    return figure(
        "loss_curve",
        extent=extent,
        columns=len(beside),
        height=HEIGHT,
        path=path,
        width=names_width(names),
    )
