"""What stands out just before a fault: a jump of the learning rate, a gradient far over those before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import Floats
from gradwatch.rules.evidence.gradient_jump import EFFECT_RECORDS, gradient_jump
from gradwatch.rules.evidence.learning_rates import RATE_JUMP_RATIO
from gradwatch.rules.evidence.onsets import own_records, step_text
from gradwatch.rules.evidence.wording import ratio_text

CLIPPED_RATIO = 0.99
"""Norm after clipping over the norm before under which the gradient was clipped. Judgement: rounding."""


@dataclass(frozen=True, slots=True)
class Shock:
    """A step that stands out, and may have made a fault that begins after it."""

    clause: str
    """What happened, for the middle of a sentence: "the learning rate jumped 30 times, to 3"."""
    short: str
    """The same without its value: "the learning rate jumped 30 times"."""
    when: str
    """The step of it: "step 60"."""
    remedy: str
    """What would have prevented it."""

    @property
    def sentence(self) -> str:
        return f" At {self.when}, {self.clause}."


def shock_before(history: History, back: int) -> Shock | None:
    """The shock in the `EFFECT_RECORDS` records before the one `back` from the end; None where there is none."""
    return _rate_shock(history, back) or _gradient_shock(history, back)


def _rate_shock(history: History, back: int) -> Shock | None:
    own, rates = own_records(history), history.scalar("lr", len(history))
    own = own[own > back][-EFFECT_RECORDS - 1 :]
    if rates is None or len(own) < 2:
        return None
    steps: Floats = rates[-own]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(steps[:-1] > 0, steps[1:] / steps[:-1], np.nan)
    if not (ratios >= RATE_JUMP_RATIO).any():
        return None
    place = int(np.nanargmax(ratios))
    rate, ratio = float(steps[place + 1]), float(ratios[place])
    clause = f"the learning rate jumped {ratio_text(np.log10(ratio))} times"
    return Shock(
        f"{clause}, to {rate:.2g}",
        clause,
        step_text(history, int(own[place + 1])),
        f"an lr_scheduler in configure_optimizers that does not jump to lr={rate:.2g}.",
    )


def _gradient_shock(history: History, back: int) -> Shock | None:
    jump = gradient_jump(history, back=back + 1)
    if jump is None or np.count_nonzero((own_records(history) > back) & (own_records(history) < jump.back)) >= (
        EFFECT_RECORDS
    ):
        return None
    norms, used = history.window("grad_norm", jump.back), history.window("grad_norm_clipped", jump.back)
    assert norms is not None, "there is a jump"
    clipped = used is not None and bool(used[0, 0] < CLIPPED_RATIO * norms[0, 0])
    ratio = ratio_text(np.log10(jump.ratio))
    return Shock(
        f"the gradient was {ratio} times the highest of the steps before",
        f"a gradient {ratio} times those before",
        step_text(history, jump.back),
        # clipping was there, and did not help
        "a smaller lr in configure_optimizers."
        if clipped
        else f"Trainer(gradient_clip_val={jump.highest:.2g}), the highest norm of the steps before.",
    )
