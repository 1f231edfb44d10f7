"""Divergence: steps as large as the weights themselves, or a loss that runs away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.alert import Finding, Severity
from gradwatch.history import OPENING, History
from gradwatch.record import TOTAL, Floats
from gradwatch.rules.constants import require_positive
from gradwatch.rules.profile import RECENT
from gradwatch.rules.updates import moves, samples
from gradwatch.rules.weights import normalised
from gradwatch.rules.wording import called, factor

GOOD_SHARE = 0.01
"""Share of their size by which a step may well move the weights: what the remedy aims at. Measured: healthy runs of
the zoo move them by 0.1 % to 5 % once they are under way."""

LATER = 5
"""Records after a step at which the loss may show what it did. Judgement."""

SHOCK = 3
"""Losses in a row that are up after a shock that does not pass. Measured: tiny weights before a norm take two."""

MARGIN = 0.1
"""By what share of itself. Judgement."""

USUAL = 5
"""Losses whose median is the level before a step, or now. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A step moved a layer's weights by more than their own size; or the loss left its first level for good."""

    name: ClassVar[str] = "divergence"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm", "weight_norm", "update_ratio"})

    update: float = 3.0
    """Update over the size of the weights that one step must not reach. `detection.md`; the zoo's healthy reach 0.7."""
    often: float = 1.0
    """The same that steps must not reach again and again. `detection.md`."""
    times: int = 2
    """How often is again. `detection.md`."""
    sampled_steps: int = 10
    """Among how many sampled steps. `detection.md`."""
    loss: float = 10.0
    """Times its highest first size that the loss must not reach. Judgement: a shift in the data makes it 3 (zoo)."""
    gradient: float = 3.0
    """Times its first level at which the gradient has grown with the loss. `detection.md`."""
    first_records: int = 10
    """Records that make up the first level of loss and gradient. As in `Exploding`."""
    rise_records: int = 50
    """Records within which a loss that diverges rises: a moving target's rises slower. Judgement."""

    def __post_init__(self) -> None:
        require_positive(self)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if 0 < history.age("update_ratio") <= LATER and (found := self._leapt(history)):
            return [found]
        return self._ran_away(history)

    def _leapt(self, history: History) -> Finding | None:
        """Steps as large as the weights, since which the loss has not been better throughout."""
        lowest, latest = min(self.often, self.update), history.window("update_ratio", LATER + 1)
        if latest is None or not (latest >= lowest).any():
            return None
        layout, places = history.layout, samples(history)[-self.sampled_steps :]
        records = min(len(history), RECENT)
        moved = np.nan_to_num(moves(history, places), nan=0.0)
        lately = places >= records - 1 - LATER
        if not lately.any():
            return None
        often = (moved[lately] >= self.often).any(axis=0) & ((moved >= self.often).sum(axis=0) >= self.times)
        now = moved[lately].max(axis=0)
        once = now >= self.update
        if not (once | often).any():
            return None
        leap = int(np.flatnonzero(lately & (moved >= lowest).any(axis=1))[0])
        rise = _rise(history, records - int(places[leap]))
        if rise is None and not once.any():
            return None
        # before a norm the size of weights is arbitrary, and small ones grow to theirs in one step
        passing = normalised(layout) and 2 * int(np.count_nonzero(now >= lowest)) < len(now)
        if rise is not None and not _worse(*rise, passing=passing):
            return None
        chosen = once if once.any() else often
        sites, worst = layout.layers[chosen], float(now[chosen].max())
        layer, names = layout.names([layout.layers[int(now.argmax())]])[0], layout.names(sites)
        limit = self.update if once.any() else self.often
        whose = f"the weights of {called(names)}"
        by = f"{worst:.2g} times their own size" if len(names) == 1 else f"up to {worst:.2g} times their own size"
        went = "" if rise is None else f", and the loss went from {rise[0]:.3g} to {rise[1].max():.3g}"
        message = (
            f"One step moved {whose} by {by}{went}; a hundredth is usual. "
            f"The learning rate is too high for this model and loss{_rate(history)}: what was learnt is overwritten."
        )
        return Finding(self.name, Severity.ERROR, layer, names, worst, limit, message, _remedy(history, worst))

    def _ran_away(self, history: History) -> Sequence[Finding] | None:
        """The loss far over, or far under, its first level, within few steps, and the gradient grown with it."""
        series = history.scalar("loss", USUAL)
        if series is None or len(history) < self.first_records + USUAL:
            return None
        if history.total < self.gradient * history.opening[0]:
            return []
        first = _first_loss(history, self.first_records)
        # half of the newest must be far off for their median to be
        if not np.count_nonzero(~(np.abs(series) < self.loss * first)) > USUAL // 2 - 1:
            return []
        losses, norms = _own(history)
        if len(losses) < self.first_records + USUAL:
            return None
        now = float(np.median(losses[-USUAL:]))
        if not np.isfinite(now):
            return None  # `nonfinite` has it
        if abs(now) < self.loss * first:
            return []
        early, late = norms[: self.first_records], norms[-USUAL:]
        level = float(np.median(early[np.isfinite(early)])) if np.isfinite(early).any() else 0.0
        grown = float(np.median(late)) / level if level > 0 else 0.0
        # down without bound: there a good loss is told from a bad one by its gradient only
        wanted = self.gradient if now > 0 else self.gradient * self.loss
        if not grown >= wanted:
            return []
        before = np.abs(losses[-self.rise_records - USUAL : -USUAL])
        calm = float(np.quantile(before[np.isfinite(before)], 0.25)) if np.isfinite(before).any() else 0.0
        if abs(now) < self.loss * max(calm, first):
            return None  # still far off, by a rise that is long over or that was slow
        value = abs(now) / first if first > 0 else 1e39  # from nothing at all
        if now > 0:
            message = (
                f"The loss is {now:.3g}, {_times(value)} the largest of its first {self.first_records} steps "
                f"({first:.3g}), and the gradient is {_times(grown)} its first level: the steps are too large"
                f"{_rate(history)}, or the loss is a sum where it should be a mean."
            )
            remedy = _remedy(history, None)
        else:
            message = (
                f"The loss falls without bound, to {now:.3g}, {_times(value)} the largest of its first "
                f"{self.first_records} steps ({first:.3g}), and the gradient is {_times(grown)} its first level: "
                "what is minimised has no minimum. Most often the sign of the loss is wrong."
            )
            remedy = (
                "return the loss, not its negative, from training_step; a reward or a log-likelihood needs the minus."
            )
        return [Finding(self.name, Severity.ERROR, TOTAL, (), value, self.loss, message, remedy)]


def _own(history: History) -> tuple[Floats, Floats]:
    """Losses and total gradient norms of the latest record's optimizer, oldest first."""
    n = len(history)
    own = history.optimizers(n) == history.optimizers(1)[0]
    losses, norms = history.scalar("loss", n), history.window("grad_norm", n)
    assert losses is not None
    assert norms is not None
    return losses[own], norms[own, 0]


def _first_loss(history: History, records: int) -> float:
    """The highest |loss| of the first `records` of this optimizer."""
    n = len(history)
    series = history.scalar("loss", n)
    assert series is not None
    own = history.optimizers(n)[:OPENING] == history.optimizers(1)[0]
    early = np.abs(series[:OPENING][own & np.isfinite(series[:OPENING])][:records])
    return float(early.max()) if len(early) else float("inf")


def _rise(history: History, back: int) -> tuple[float, Floats] | None:
    """The usual loss up to the record `back` from the end, and the losses since; None where they are not known.

    With several optimizers each has its own loss: then they are not.
    """
    series, optimizers = history.scalar("loss", USUAL + back - 1), history.optimizers(USUAL + back - 1)
    if series is None or (optimizers != optimizers[-1]).any() or np.isnan(series).all():
        return None
    before = series[: 1 - back]
    before, after = before[np.isfinite(before)], series[1 - back :]
    return (float(np.median(before)), after) if len(before) and len(after) else None


def _worse(before: float, after: Floats, *, passing: bool) -> bool:
    """Whether a loss rose; where the shock may be a `passing` one, whether it stays up."""
    if not np.isfinite(after).all():
        return True
    if passing:
        return len(after) >= SHOCK and bool(after[-SHOCK:].min() > before + MARGIN * abs(before))
    return bool(after.max() > before)


def _rate(history: History) -> str:
    """' (lr=0.3, 100 times that of 20 steps ago)', as far as it is known."""
    rates = history.scalar("lr", 20)
    if rates is None or not rates[-1] > 0:
        return ""
    lowest = float(np.nanmin(rates))
    jump = (
        f", {factor(np.log10(rates[-1] / lowest))} times that of {len(rates)} steps ago"
        if rates[-1] > 5 * lowest > 0
        else ""
    )
    return f" (lr={rates[-1]:.2g}{jump})"


def _times(ratio: float) -> str:
    return f"{factor(np.log10(ratio))} times"


def _remedy(history: History, moved: float | None) -> str:
    rates = history.scalar("lr", 1)
    if moved is not None and rates is not None and rates[0] > 0:
        return f"lr={rates[0] * GOOD_SHARE / moved:.1g} in configure_optimizers, with warm-up."
    if moved is None:
        return "a smaller lr in configure_optimizers, or Trainer(gradient_clip_val=1.0)."
    return "a smaller lr in configure_optimizers, with warm-up."
