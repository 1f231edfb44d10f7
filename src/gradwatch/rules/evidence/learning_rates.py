"""Learning rates: whether one jumped, how it is said, and which rate would do."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import Floats
from gradwatch.rules.evidence.gradient_jump import LATER
from gradwatch.rules.evidence.wording import ratio_text

JUMP = 5.0
"""Times the rate of the step before at which a learning rate jumps: a warm-up may double it. Judgement."""

GOOD_SHARE = 0.01
"""Share of their size by which a step may well move the weights: what the remedy aims at. Measured: healthy runs of
the zoo move them by 0.1 % to 5 % once they are under way."""

LONG_MOMENTUM = 0.97
"""Momentum from which on it is named: 0.95 is the most that is usual. Judgement."""


def rate_jump(history: History, *, records: int = LATER) -> tuple[float, float] | None:
    """The learning rate after its steepest jump among the last `records` of this optimizer, and how many times that
    before the jump it is; None where it did not jump.
    """
    n = len(history)
    rates, optimizers = history.scalar("lr", n), history.optimizers(n)
    if rates is None:
        return None
    own: Floats = rates[optimizers == optimizers[-1]][-records - 1 :]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(own[:-1] > 0, own[1:] / own[:-1], np.nan)
    if not (ratios >= JUMP).any():
        return None
    place = int(np.nanargmax(ratios))
    return float(own[place + 1]), float(ratios[place])


def rate_text(history: History) -> str:
    """' (lr=0.3, 100 times that of 20 steps ago)', as far as it is known."""
    rates, momentum = history.scalar("lr", 20), history.scalar("momentum", 1)
    if rates is None or not rates[-1] > 0:
        return ""
    said, lowest = f"lr={rates[-1]:.2g}", float(np.nanmin(rates))
    if (jump := rate_jump(history)) is not None and jump[0] > rates[-1]:
        said += f", after lr={jump[0]:.2g}, {ratio_text(np.log10(jump[1]))} times the rate before it"
    elif rates[-1] > JUMP * lowest > 0:
        said += f", {ratio_text(np.log10(rates[-1] / lowest))} times that of {len(rates)} steps ago"
    if momentum is not None and momentum[0] >= LONG_MOMENTUM:
        said += f", momentum={momentum[0]:.4g}, which adds up the gradients of {1 / (1 - momentum[0]):.0f} steps"
    return f" ({said})"


def better_rate(history: History, *, moved: float | None = None) -> str:
    """The change to try; `moved`: update over the size of the weights."""
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
