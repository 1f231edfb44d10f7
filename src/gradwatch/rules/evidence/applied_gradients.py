"""The gradients that the optimizer applied: what clipping left of them, and how many backward passes they sum up.

Remedies use these where they were measured; no rule needs them.
"""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import History
from gradwatch.rules.evidence.records import is_own, number_of

CLIPPED_RECORDS = 100
"""Records in which clipping is looked for. Judgement."""

CLIPPED_SHARE = 0.99
"""Share of its norm under which a gradient was clipped: rounding leaves more. Judgement."""

LEAST_PASSES = 3
"""Backward passes from which they are many: losses of two parts may have one each. Judgement."""

MOST_PASSES = 4096
"""Backward passes from which a gradient was multiplied, and is no sum. Judgement."""


def clipping_limit(history: History) -> float | None:
    """The highest total norm that clipping has left lately; None where it left every gradient as it was."""
    norms, used = history.window("grad_norm", CLIPPED_RECORDS), history.window("grad_norm_clipped", CLIPPED_RECORDS)
    if norms is None or used is None:
        return None
    own = is_own(history, CLIPPED_RECORDS)
    clipped = own & np.isfinite(norms[:, 0]) & (used[:, 0] > 0) & (used[:, 0] < CLIPPED_SHARE * norms[:, 0])
    return float(used[clipped, 0].max()) if clipped.any() else None


def usual_norm(history: History, *, back: int) -> float | None:
    """The median of this optimizer's finite total norms in the `CLIPPED_RECORDS` records before the one `back` from the
    end; None where there are none.
    """
    n = CLIPPED_RECORDS + back
    norms = history.window("grad_norm", n)
    if norms is None:
        return None
    before = norms[:-back, 0][is_own(history, n)[:-back]]
    before = before[np.isfinite(before)]
    return float(np.median(before)) or None if len(before) else None


def summed_passes(history: History) -> int | None:
    """Of how many backward passes, at least, a step's gradient is the sum; None where it is of few, or a mean.

    The norm of a sum of N vectors is at most sqrt(N) times the root of the sum of their squared norms, which is the
    norm of what has arrived (Cauchy and Schwarz).
    """
    norms, arrived = history.window("grad_norm", CLIPPED_RECORDS), history.window("arrived_norm", CLIPPED_RECORDS)
    stale = history.scalar("stale", CLIPPED_RECORDS)
    if norms is None or arrived is None or number_of(history, "accumulate") > 1:
        return None
    if stale is not None and (stale > 0).any():
        return None
    own = is_own(history, CLIPPED_RECORDS)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = (norms[own, 0] / arrived[own, 0]) ** 2
    least = least[np.isfinite(least)]
    # the step before may have been the only one that was sampled
    return int(np.ceil(least.max() - 1e-6)) if len(least) and LEAST_PASSES <= least.max() <= MOST_PASSES else None
