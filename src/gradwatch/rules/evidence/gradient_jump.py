"""A jump of the gradient at one batch, which explains a fault a few steps later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwatch.core.history import History
from gradwatch.rules.evidence.wording import ratio_text

EFFECT_RECORDS = 5
"""Records within which the effect of a gradient jump shows. Judgement."""

OVERFLOW_RECORDS = 10
"""Records from a jump to an overflow of the weights, at most. Judgement."""

BASELINE_RECORDS = 20
"""Records before a jump with which the gradient is compared. As in `Spike`."""

JUMP_RATIO = 10.0
"""Ratio to the highest gradient before from which a gradient is a jump. As in `Spike`."""


@dataclass(frozen=True, slots=True)
class GradientJump:
    """A gradient norm far over all that came before it."""

    back: int
    """Records from the end; 1 is the latest."""
    ratio: float
    """The norm over the highest before it."""
    highest: float
    """The highest norm before it."""
    batch: float
    """Index of the batch; NaN where it is not known."""

    @property
    def cause(self) -> str:
        at = f" at batch {self.batch:.0f}" if np.isfinite(self.batch) else ""
        ago = self.back - 1
        when = f"{at}, {ago} step{'s' * (ago > 1)} before," if ago else at
        return (
            f"the gradient{when} was {ratio_text(np.log10(self.ratio))} times the highest until then: that one batch "
            "threw the weights far off."
        )

    @property
    def remedy(self) -> str:
        return f"Trainer(gradient_clip_val={self.highest:.2g}), the highest norm before it."


def gradient_jump(history: History, *, back: int = 1) -> GradientJump | None:
    """The first jump among the `OVERFLOW_RECORDS` records up to the one `back` from the end, compared with the
    `BASELINE_RECORDS` records before it; None where there is none, or too few records.
    """
    n = BASELINE_RECORDS + OVERFLOW_RECORDS + back
    norms, optimizers = history.window("grad_norm", n), history.optimizers(n)
    if norms is None:
        return None
    own = np.flatnonzero(optimizers == optimizers[-1])
    totals, backs = norms[own, 0], len(norms) - own
    for place in np.flatnonzero((backs >= back) & (backs < back + OVERFLOW_RECORDS)):
        earlier = totals[max(0, place - BASELINE_RECORDS) : place]
        earlier = earlier[np.isfinite(earlier)]
        if len(earlier) < BASELINE_RECORDS // 2 or not np.isfinite(totals[place]):
            continue
        highest = float(earlier.max())
        # a gradient that was growing before is no jump
        if 0 < highest * JUMP_RATIO <= totals[place] and highest <= np.median(earlier) * JUMP_RATIO:
            gone = int(backs[place])
            batches = history.scalar("batch", gone)
            batch = float("nan") if batches is None else float(batches[0])
            return GradientJump(gone, float(totals[place]) / highest, highest, batch)
    return None
