"""A loss scale, as gradient norms show it."""

from __future__ import annotations

import numpy as np

from gradwatch.core.record import Floats

MIN_LOSS_SCALE = 2.0**7
"""The smallest factor that counts as a loss scale. Judgement: gradients are divided by smaller powers of two for other
reasons; a GradScaler begins with 2^16."""
TOLERANCE = 1e-5
"""Relative tolerance of the norms, which are float32."""


def remaining_scale(before: Floats, after: Floats, *, any_factor: bool = False) -> float:
    """The loss scale that norms have `before` and not `after`: the same number for all; 0 where there is none.

    A power of two, as a GradScaler has by default, unless `any_factor`.
    """
    if before[0] < MIN_LOSS_SCALE / 2 * after[0]:  # the totals: with clipping this runs at every step
        return 0.0
    known = np.isfinite(before) & np.isfinite(after) & (before > 0) & (after > 0)
    if not known.any():
        return 0.0
    factors = before[known] / after[known]
    scale = float(factors[0] if any_factor else 2.0 ** np.round(np.log2(factors[0])))
    return scale if scale >= MIN_LOSS_SCALE and np.allclose(factors, scale, rtol=TOLERANCE, atol=0.0) else 0.0
