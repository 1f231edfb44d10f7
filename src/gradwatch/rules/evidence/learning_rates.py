"""Learning rates: whether the rate jumped, its wording in alerts, and the rate to try."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import Floats
from gradwatch.rules.evidence.gradient_jump import EFFECT_RECORDS
from gradwatch.rules.evidence.wording import ratio_text

RATE_JUMP_RATIO = 5.0
"""Ratio to the rate of the step before from which it is a jump: a warm-up may double the rate. Judgement."""

GOOD_SHARE = 0.01
"""Update over the size of the weights that the remedy aims at. Measured: healthy runs of the zoo have 0.001 to 0.05
after the first steps."""

LONG_MOMENTUM = 0.97
"""Momentum from which alerts name it: usual values go up to 0.95. Judgement."""


def rate_jump(history: History, *, records: int = EFFECT_RECORDS) -> tuple[float, float] | None:
    """The learning rate after its largest jump within the last `records` records of this optimizer, and its ratio to
    the rate before; None where it did not jump.
    """
    n = len(history)
    rates, optimizers = history.scalar("lr", n), history.optimizers(n)
    if rates is None:
        return None
    own: Floats = rates[optimizers == optimizers[-1]][-records - 1 :]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(own[:-1] > 0, own[1:] / own[:-1], np.nan)
    if not (ratios >= RATE_JUMP_RATIO).any():
        return None
    place = int(np.nanargmax(ratios))
    return float(own[place + 1]), float(ratios[place])


def rate_text(history: History) -> str:
    """' (lr=0.3, 100 times that of 20 steps ago)', empty where the rate is not known."""
    rates, momentum = history.scalar("lr", 20), history.scalar("momentum", 1)
    if rates is None or not rates[-1] > 0:
        return ""
    said, lowest = f"lr={rates[-1]:.2g}", float(np.nanmin(rates))
    if (jump := rate_jump(history)) is not None and jump[0] > rates[-1]:
        said += f", after lr={jump[0]:.2g}, {ratio_text(np.log10(jump[1]))} times the rate before it"
    elif rates[-1] > RATE_JUMP_RATIO * lowest > 0:
        said += f", {ratio_text(np.log10(rates[-1] / lowest))} times that of {len(rates)} steps ago"
    if momentum is not None and momentum[0] >= LONG_MOMENTUM:
        said += f", momentum={momentum[0]:.4g}, which adds up the gradients of {1 / (1 - momentum[0]):.0f} steps"
    return f" ({said})"


def better_rate(history: History, *, moved: float | None = None) -> str:
    """The remedy: which rate to try. `moved`: update over the size of the weights."""
    rates, momentum = history.scalar("lr", 1), history.scalar("momentum", 1)
    if (jump := rate_jump(history)) is not None:
        return f"an lr_scheduler in configure_optimizers that does not jump to lr={jump[0]:.2g}."
    if momentum is not None and momentum[0] >= LONG_MOMENTUM:
        return "momentum=0.9 in configure_optimizers."
    if moved is not None and rates is not None and rates[0] > 0:
        return f"lr={rates[0] * GOOD_SHARE / moved:.1g} in configure_optimizers, with warm-up."
    if moved is None:
        return "a smaller lr in configure_optimizers, or Trainer(gradient_clip_val=1.0)."
    return "a smaller lr in configure_optimizers, with warm-up."
