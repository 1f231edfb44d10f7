"""The loss over the steps, below the heatmap and on its axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwatch.runs.pages import figure
from gradwatch.runs.report.heatmap import names_width
from gradwatch.sinks.downsampling import Downsampling

HEIGHT = 100
"""Units of height."""

SHOWN_SHARE = 0.995
"""Share of the highest values that are inside the picture, so that one spike does not flatten the rest. Judgement."""


def path_of(loss: Downsampling, beside: Downsampling) -> tuple[str, float, float]:
    """The curve as an SVG path over the columns of `beside`, `HEIGHT` high, and its least and most; ("", 0, 0) where
    nothing of it is finite.
    """
    low, high = (numbers[:, 0].astype(np.float64) for numbers in loss.extremes())
    finite = np.isfinite(high) & np.isfinite(low)
    if not finite.any():
        return "", 0.0, 0.0
    least, most = float(low[finite].min()), float(np.quantile(high[finite], SHOWN_SHARE))
    span = (most - least) or 1.0
    x = (np.arange(len(high)) * loss.stride + loss.axis[0] - beside.axis[0] + loss.stride / 2) / beside.stride
    highs = np.clip(HEIGHT * (1 - (high - least) / span), 0, HEIGHT)
    lows = np.clip(HEIGHT * (1 - (low - least) / span), 0, HEIGHT)
    path, pen = "", "M"
    for there, at, top, bottom in zip(finite.tolist(), x.tolist(), highs.tolist(), lows.tolist(), strict=True):
        if there:
            path += f"{pen}{at:.1f} {top:.1f}"
            path += f"V{bottom:.1f}" if bottom > top else ""
            pen = "L"
        else:
            pen = "M"
    return path, least, most


def curve(loss: Downsampling, beside: Downsampling, names: Sequence[str]) -> str:
    """HTML of one number per step, kept as it is; `beside`: on whose axis it is drawn, next to `names`."""
    path, least, most = path_of(loss, beside)
    if not path:
        return ""
    return figure(
        "loss_curve",
        least=f"{least:.4g}",
        most=f"{most:.4g}",
        columns=len(beside),
        height=HEIGHT,
        path=path,
        width=names_width(names),
    )
