"""Stale gradients: they are not cleared, and each step follows the gradients of earlier steps again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text
from gradwatch.core.history import History
from gradwatch.core.record import TOTAL, Mask, Sites
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import held_layers, own_records
from gradwatch.rules.evidence.samples import in_a_row
from gradwatch.rules.evidence.wording import ratio_text
from gradwatch.rules.rule import CheckedRule

LOOKBACK_RECORDS = 8
"""Records in which the last few with a measurement are searched. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleGrad(CheckedRule):
    """After the optimizer has moved, backward passes add to the gradients that moved it.

    Micro-batches of one step are added up on purpose; an optimizer that has not moved the weights since was not done
    with them.
    """

    name: ClassVar[str] = "stale_grad"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm", "weight_norm", "update_ratio"})

    old_share: float = 0.1
    """Norm of the old gradient relative to the new one from which it is a fault. Clipping may leave less, and so does a
    loss scale that is divided out twice. Judgement; if nothing is cleared it is 0.8 or more (measured)."""
    records: int = 3
    """Steps in a row. Prototype."""

    def suspects(self, rows: RecentRows) -> Mask:
        """Old gradients were there."""
        return np.asarray(rows.scalar("stale") >= self.old_share)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        now = history.number("stale")
        if not now >= self.old_share:
            return None if np.isnan(now) else []
        own = own_records(history)
        stale = history.scalar("stale", len(history))[-own]
        known = np.flatnonzero(~np.isnan(stale) & _moved(history, own))
        times = int(in_a_row(stale[known] >= self.old_share))
        if times < self.records or len(own) - known[-self.records] > LOOKBACK_RECORDS + self.records:
            return []
        return [self._finding(history, now, int(own[known[-times]]), times)]

    def _finding(self, history: History, stale: float, onset: int, times: int) -> Finding:
        """`onset`: the position of the first record at which old gradients were there, and were at each one since that
        is known; `times`: the number of those.
        """
        held = held_layers(history)
        ratio = ratio_text(np.log10(stale))
        often = f"at {times} measured steps" if history.has_gaps(onset) else f"{times} times"
        whose = f" of {name_text(held)}" if held else ""
        message = (
            f"Gradients{whose} are not cleared between steps: {often} in a row, those already used were still there "
            f"when new ones were added to them. In a few parameters that are checked, the old ones are {ratio} times "
            "as large as what one backward pass adds now. Each step follows old batches again."
        )
        remedy = "an optimizer_zero_grad that clears at each call."
        headline = "gradients of old steps stay, and new ones are added to them"
        layer = held[0] if held else TOTAL
        return Finding(self.name, Severity.ERROR, layer, held, stale, self.old_share, message, remedy, onset, headline)


def _moved(history: History, own: Sites) -> Mask:
    """At which of the records `own` the step before of the same optimizer had moved the weights, as far as it was
    sampled.
    """
    weights, updates = (history.window(name, len(history), sites=0)[-own] for name in ("weight_norm", "update_ratio"))
    return np.append(True, np.isnan(weights[:-1]) | (updates[:-1] > 0))
