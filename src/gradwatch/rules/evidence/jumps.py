"""What came just before a fault, and so may have made it: a jump of the learning rate, or else of the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwatch.core.history import History
from gradwatch.rules.evidence.gradient_jump import EFFECT_RECORDS, GradientJump, gradient_jump
from gradwatch.rules.evidence.learning_rates import RateJump, rate_jump
from gradwatch.rules.evidence.onsets import began_text, is_first_record
from gradwatch.rules.evidence.records import own_records


def last_jump(
    history: History, *, rate: int, gradient: int, records: int = EFFECT_RECORDS
) -> RateJump | GradientJump | None:
    """The jump of the rate up to the record `rate` from the end, as in `rate_jump`; or else that of the gradient up to
    the record `gradient` from the end.
    """
    return rate_jump(history, back=rate, records=records) or gradient_jump(history, back=gradient)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is known of how a fault began."""

    began: str
    """' It was not so before.', or the like."""
    sentence: str
    """' At step 30, the learning rate jumped 30 times, to 3.', empty where nothing came just before."""
    headline: str
    """When or by what, as the end of a clause: ' since the first step', ': the learning rate jumped 30 times, to 3';
    empty where neither is known."""
    remedy: str
    """What would have prevented it; empty where nothing came just before."""


def beginning(history: History, back: int) -> Beginning:
    """How a fault began that is there since the record `back` from the end: of what came before, the `EFFECT_RECORDS`
    records that are nearest count.
    """
    began, own = began_text(history, back), own_records(history)
    jump = last_jump(history, rate=back + 1, gradient=back + 1)
    if isinstance(jump, GradientJump) and np.count_nonzero((own > back) & (own < jump.back)) >= EFFECT_RECORDS:
        jump = None
    if jump is None:
        return Beginning(began, "", " since the first step" if is_first_record(history, back) else "", "")
    # clipping was there, and did not help
    clipped = isinstance(jump, GradientJump) and jump.limit is not None
    remedy = "a smaller lr in configure_optimizers." if clipped else jump.remedy
    when = "By" if isinstance(jump, RateJump) and jump.after_gap else "At"
    return Beginning(began, f" {when} step {history.steps[-jump.back]}, {jump.text}.", f": {jump.text}", remedy)
