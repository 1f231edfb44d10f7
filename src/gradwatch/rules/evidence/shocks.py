"""What stands out just before a fault: a jump of the learning rate, a gradient far over those before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwatch.core.history import History
from gradwatch.rules.evidence.applied_gradients import CLIPPED_SHARE
from gradwatch.rules.evidence.gradient_jump import EFFECT_RECORDS, gradient_jump
from gradwatch.rules.evidence.learning_rates import rate_jump
from gradwatch.rules.evidence.records import own_records, row_of
from gradwatch.rules.evidence.wording import ratio_text


@dataclass(frozen=True, slots=True)
class Shock:
    """A step that stands out, and may have made a fault that begins after it."""

    clause: str
    """What happened, for the middle of a sentence: "the learning rate jumped 30 times, to 3"."""
    short: str
    """The same without its value: "the learning rate jumped 30 times"."""
    step: int
    remedy: str
    """What would have prevented it."""

    @property
    def sentence(self) -> str:
        return f" At step {self.step}, {self.clause}."


def shock_before(history: History, back: int) -> Shock | None:
    """The shock in the `EFFECT_RECORDS` records before the one `back` from the end; None where there is none."""
    return _rate_shock(history, back) or _gradient_shock(history, back)


def _rate_shock(history: History, back: int) -> Shock | None:
    jump = rate_jump(history, back=back + 1)
    if jump is None:
        return None
    return Shock(jump.text, jump.short_text, history.steps[-jump.back], jump.remedy)


def _gradient_shock(history: History, back: int) -> Shock | None:
    jump = gradient_jump(history, back=back + 1)
    if jump is None or np.count_nonzero((own_records(history) > back) & (own_records(history) < jump.back)) >= (
        EFFECT_RECORDS
    ):
        return None
    norm, used = (row_of(history, name, back=jump.back)[0] for name in ("grad_norm", "grad_norm_clipped"))
    # clipping was there, and did not help
    clipped = used < CLIPPED_SHARE * norm
    ratio = ratio_text(np.log10(jump.ratio))
    return Shock(
        f"the gradient was {ratio} times the highest of the steps before",
        f"a gradient {ratio} times those before",
        history.steps[-jump.back],
        "a smaller lr in configure_optimizers."
        if clipped
        else f"Trainer(gradient_clip_val={jump.highest:.2g}), the highest norm of the steps before.",
    )
