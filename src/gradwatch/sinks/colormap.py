"""The colours of numbers: from dark to light by the logarithm, also distinct for colour-blind readers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from gradwatch.sinks.downsampling import Logs

VIRIDIS = (
    *("440154", "482475", "414487", "355f8d", "2a788e", "21918c"),
    *("22a884", "44bf70", "7ad151", "bddf26", "fde725"),
)
"""Eleven colours of viridis (van der Walt and Smith, matplotlib, CC0), whose lightness increases evenly."""

DIVERGING = ("053061", "2166ac", "4393c3", "92c5de", "e6e6e6", "fdb863", "e08214", "b35806", "7f3b08")
"""Less, the same in the middle, more: the ends of ColorBrewer's RdBu and PuOr (Brewer, Apache 2.0), which the
colour-blind tell apart."""

SHADES = 240
"""Shades of the scale. Judgement: more than can be distinguished."""

ZERO, NONFINITE, MISSING = SHADES, SHADES + 1, SHADES + 2
"""Their indices in the palette, after the shades."""

ZERO_COLOUR, NONFINITE_COLOUR = "#8d96a0", "#e5484d"

OUTLIER_SHARE = 0.002
"""Share of the numbers at each end that may lie beyond the scale, so that one outlier does not make all others look
alike. Judgement."""

MIN_SCALE_DECADES = 2.0
"""Decades of the scale, at least, so that small variation stays small. Judgement."""


@dataclass(frozen=True, slots=True)
class ColourScale:
    """The range of log10 from the darkest to the lightest colour."""

    low: float
    high: float
    clipped_low: bool
    clipped_high: bool

    def shade(self, logs: Logs) -> NDArray[np.uint8]:
        """The index of each number in the palette."""
        share = (np.nan_to_num(logs, nan=0.0, posinf=0.0, neginf=0.0) - self.low) / (self.high - self.low)
        places: NDArray[np.uint8] = np.clip(share * SHADES, 0, SHADES - 1).astype(np.uint8)
        places[np.isneginf(logs)] = ZERO
        places[np.isposinf(logs)] = NONFINITE
        places[np.isnan(logs)] = MISSING
        return places


def scale_of(logs: Logs) -> ColourScale:
    finite = np.sort(logs[np.isfinite(logs)]).astype(np.float64)
    if not finite.size:
        return ColourScale(-1.0, 1.0, False, False)
    last = len(finite) - 1  # the nearest of the quantiles: numpy.quantile takes ten times as long
    low, high = finite[[round(OUTLIER_SHARE * last), round((1 - OUTLIER_SHARE) * last)]].tolist()
    middle, span = (low + high) / 2, max(MIN_SCALE_DECADES, high - low)
    low, high = middle - span / 2, middle + span / 2
    return ColourScale(low, high, bool(finite[0] < low), bool(finite[-1] > high))


def diverging_scale_of(logs: Logs) -> ColourScale:
    """The range of `logs`, with 0 in its middle."""
    found = scale_of(logs)
    wide = max(MIN_SCALE_DECADES / 2, abs(found.low), abs(found.high))
    finite = logs[np.isfinite(logs)]
    clipped = bool(finite.size) and float(np.abs(finite).max()) > wide
    return ColourScale(-wide, wide, clipped, clipped)


@cache
def palette(colours: tuple[str, ...] = VIRIDIS) -> NDArray[np.uint8]:
    """Red, green, blue and opacity of each index: shape [indices, 4]. Do not write to it."""
    anchors = np.array([_rgb(colour) for colour in colours], dtype=float)
    places = np.linspace(0, len(anchors) - 1, SHADES)
    shades = np.stack([np.interp(places, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)], axis=1)
    special = [(*_rgb(colour[1:]), 255) for colour in (ZERO_COLOUR, NONFINITE_COLOUR)]
    opaque = np.pad(shades.round(), ((0, 0), (0, 1)), constant_values=255)
    return np.concatenate([opaque, special, [(0, 0, 0, 0)]]).astype(np.uint8)


def _rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of six hexadecimal digits."""
    return int(colour[:2], 16), int(colour[2:4], 16), int(colour[4:], 16)


def format_power_of_ten(log: float) -> str:
    """10 to the power of `log`, as short text: '3e-5', '0.02', '40'."""
    if -2 <= log < 4:
        return f"{10**log:.2g}" if log < 2 else f"{10**log:.0f}"
    whole = math.floor(log)
    digit = round(10 ** (log - whole))
    return f"1e{whole + 1}" if digit == 10 else f"{digit}e{whole}"
