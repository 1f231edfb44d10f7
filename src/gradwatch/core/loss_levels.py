"""The level of the loss at the start of a run and at its end: whether anything was learnt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwatch.core.block import Block

LEVEL_LOSSES = 10
"""Losses whose median is a level. Judgement: single batches differ."""

JUDGED_STEPS = 50
"""Steps before which nothing is said of the loss: it need not have moved by then. Judgement."""

LOWER_LOSS_SHARE = 0.02
"""Share of its first level by which a loss has to fall to count as lower. Judgement: the noise of a level of ten losses
is about that where nothing is learnt."""


class LossLevels:
    """Collects the losses of a run with one optimizer; of several, each may have a loss of its own."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: list[float] = []
        self._steps = 0
        self._several = False

    def extend(self, block: Block) -> None:
        losses = block.scalars.get("loss")
        self._several |= bool((block.optimizers != 0).any())
        if losses is None or self._several:
            return
        finite = losses[np.isfinite(losses)].tolist()
        self._steps += len(finite)
        self._first += finite[: LEVEL_LOSSES - len(self._first)]
        self._last = [*self._last, *finite][-LEVEL_LOSSES:]

    @property
    def levels(self) -> tuple[float, float] | None:
        """The first and the last level; None where they are not known, or it is too early to tell."""
        if self._several or self._steps < JUDGED_STEPS:
            return None
        return float(np.median(self._first)), float(np.median(self._last))

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "last": self._last, "steps": self._steps, "several": self._several}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises LookupError, TypeError or ValueError for a state that `state_dict` did not make."""
        first, last = ([float(loss) for loss in state[key]] for key in ("first", "last"))
        self._first, self._last = first[:LEVEL_LOSSES], last[-LEVEL_LOSSES:]
        self._steps, self._several = int(state["steps"]), bool(state["several"])


def loss_text(levels: tuple[float, float]) -> str:
    """What the loss did, for a sentence: 'loss 231 -> 231: it has not moved'; empty where it fell."""
    first, last = levels
    size = max(abs(first), abs(last))
    if last < first - LOWER_LOSS_SHARE * abs(first):
        return ""
    moved = "it has not moved" if last <= first + LOWER_LOSS_SHARE * size else "it is higher than at the start"
    return f"loss {first:.3g} -> {last:.3g}: {moved}"
