"""At which record a fault begins, as a position from the end of the history: 1 is the latest record."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.loss_levels import LOWER_LOSS_SHARE
from gradwatch.core.record import MEASURED
from gradwatch.rules.evidence.baseline import LEVEL_RECORDS, first_and_last_loss
from gradwatch.rules.evidence.recent_rows import ROUNDING
from gradwatch.rules.evidence.records import own_records
from gradwatch.rules.evidence.samples import streak_starts


def gradient_zero_since(history: History, site: int) -> int | None:
    """Since when the gradient of `site` has been exactly 0, of the records of this optimizer that have it; None where
    it is not 0 at the latest.
    """
    own, norms = own_records(history), history.window("grad_norm", len(history), sites=site)
    if norms is None or history.codes(1)[0, site] != MEASURED or norms[-1] != 0:
        return None
    own = own[history.codes(len(history))[-own, site] == MEASURED]
    return int(streak_starts(norms[-own] == 0, own - 1))


def is_first_record(history: History, back: int) -> bool:
    """Whether the record `back` from the end is known to be this optimizer's first of the run."""
    return history.whole and not (own_records(history) > back).any()


def began_text(history: History, back: int) -> str:
    """' It is so from the first step on.', or what else is known of the time before the record `back` from the end."""
    if is_first_record(history, back):
        return " It is so from the first step on."
    known = (own_records(history) > back).any()
    return " It was not so before." if known else " It is so for as long as the record goes back."


def unlearnt(history: History) -> str:
    """' The loss is higher than at the start (2.31 -> 2.32).', empty where it is lower, or the start is not known."""
    if not history.whole or (levels := first_and_last_loss(history, LEVEL_RECORDS)) is None:
        return ""
    first, last = levels
    if not np.isfinite([first, last]).all() or last < first - LOWER_LOSS_SHARE * abs(first) * ROUNDING:
        return ""
    how = "higher than" if last > first else "as high as"
    return f" The loss is {how} at the start ({first:.3g} -> {last:.3g})."
