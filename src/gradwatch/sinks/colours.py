"""Numbers as colours that say the same to the colour-blind and in grey."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STOPS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
"""Viridis at tenths, from dark to light (S. van der Walt and N. Smith, matplotlib 2015; given to the public domain)."""

SHADES = 64
"""Colours in all: what cannot be told apart need not be stored. Judgement."""

RED = (214, 39, 40)
"""Not finite; and what an alert points at."""

BLACK = (0, 0, 0)
"""Exactly zero."""

NOTHING = (226, 226, 226)
"""Not measured."""


def colours(logs: NDArray[np.floating], low: float, high: float) -> NDArray[np.uint8]:
    """`logs` of any shape [...] as RGB, [..., 3]: from `low` to `high` along `STOPS`, what is beyond as the nearest.

    -inf stands for zero, +inf for what is not finite, NaN for what was not measured.
    """
    stops = np.array([[int(stop[i : i + 2], 16) for i in (0, 2, 4)] for stop in STOPS], dtype=float)
    with np.errstate(invalid="ignore"):
        share = np.clip((logs - low) / max(high - low, 1e-9), 0.0, 1.0)
    share = np.round(np.nan_to_num(share) * (SHADES - 1)) / (SHADES - 1)
    ends = np.linspace(0.0, 1.0, len(stops))
    drawn = np.stack([np.interp(share, ends, stops[:, channel]) for channel in range(3)], axis=-1)
    drawn[np.isnan(logs)], drawn[np.isneginf(logs)], drawn[np.isposinf(logs)] = NOTHING, BLACK, RED
    return np.round(drawn).astype(np.uint8)
