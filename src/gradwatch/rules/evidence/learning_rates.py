"""Jumps of the learning rate, and the rate to try; what clipping left of gradients, and how many passes they add up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.median import median
from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats
from gradwatch.core.remaining_scale import remaining_scale
from gradwatch.rules.evidence.records import is_own, own_records
from gradwatch.rules.evidence.samples import RECENT_RECORDS
from gradwatch.rules.evidence.weights import relative_updates, update_samples
from gradwatch.rules.evidence.wording import distance_text, ratio_text

EFFECT_RECORDS = 5
"""Records within which the effect of a jump shows. Judgement."""

RATE_JUMP_RATIO = 5.0
"""Ratio to the rate of the step before from which it is a jump: a warm-up may double the rate. Judgement."""

GOOD_SHARE = 0.03
"""Update over the size of the weights that the remedy aims at in the first step. Measured: healthy runs of the zoo have
0.001 to 0.05 after the first steps; at a third of it a transformer learns too slowly to count as fixed."""

SANE_SHARE = 0.05
"""Update over the size of the weights up to which a step counts as sane. As for `GOOD_SHARE`."""

RAISING_UPDATE = 0.1
"""Update over the size of the weights from which steps may be what raises a loss tenfold. Measured: where a rate is too
high for the loss, 0.17 or more at the sample before; where a loss grows with the rewards that an agent finds, up to
0.08."""

LOWER_RATE_SHARE = 0.8
"""Share of the present rate under which an earlier rate is a lower one. Judgement."""

LONG_MOMENTUM = 0.97
"""Momentum from which alerts name it: usual values go up to 0.95. Judgement."""

CLIPPED_RECORDS = 100
"""Records in which clipping is looked for. Judgement."""

CLIPPED_SHARE = 0.99
"""Share of its norm under which a gradient was clipped: rounding leaves more. Judgement."""

SAME_LIMIT = 1e-3
"""Share of itself by which what clipping leaves of gradients varies, at most. Judgement: rounding."""

SCALED_CLIPPING = (
    "Trainer(gradient_clip_val=...), with the usual norm of the gradient; a loss scale, if there is one, is no part of "
    "it."
)
"""The remedy where the usual norm is not known, as `may_be_scaled` says."""

LEAST_PASSES = 3
"""Backward passes from which they are many: losses of two parts may have one each. Judgement."""

MOST_PASSES = 4096
"""Backward passes from which a gradient was multiplied, and is no sum. Judgement."""

SGD_TOLERANCE = 2.0
"""Times as long, or as short, as the rate times the gradient a step of SGD without momentum may be. Judgement: weight
decay adds to it."""

MAXIMIZES = "the optimizer goes up the loss, not down (maximize=True)."
"""The cause where the loss rises and `maximizes`."""

MAXIMIZES_REMEDY = "maximize=False in configure_optimizers, or a loss with the other sign."


@dataclass(frozen=True, slots=True)
class RateJump:
    """A learning rate many times that of the step before."""

    rate: float
    before: float
    """The rate of the step before."""
    back: int
    """The position of its record from the end of the history; 1 is the latest."""
    after_gap: bool
    """Whether the step before was not measured: the rate is that of the last that was, and rose somewhere between."""

    @property
    def ratio(self) -> float:
        return self.rate / self.before

    @property
    def text(self) -> str:
        """'the learning rate jumped 300 times, to 3'."""
        return f"the learning rate jumped {ratio_text(np.log10(self.ratio))} times, to {number_text(self.rate, 3)}"

    @property
    def remedy(self) -> str:
        jump = f"from lr={number_text(self.before, 3)} to lr={number_text(self.rate, 3)}"
        return f"an lr_scheduler in configure_optimizers that does not jump {jump}."


def rate_jump(history: History, *, back: int = 1, of: int = 1, records: int = EFFECT_RECORDS) -> RateJump | None:
    """The largest jump of the learning rate at one of the `records` records up to the one `back` from the end that are
    of the optimizer of the record `of`; None where it did not jump.
    """
    rates, own = history.scalar("lr", len(history)), own_records(history, of=of)
    own = own[own >= back][-records - 1 :]
    known = rates[-own]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(known[:-1] > 0, known[1:] / known[:-1], np.nan)
    if not (ratios >= RATE_JUMP_RATIO).any():
        return None
    place = int(np.nanargmax(ratios))
    since, there = own[place : place + 2].tolist()
    after_gap = history.has_gaps(since - there + 1, back=there)
    return RateJump(float(known[place + 1]), float(known[place]), there, after_gap)


def maximizes(history: History) -> bool:
    """Whether the optimizer of the latest record is meant to raise the loss."""
    return history.number("maximize") == 1


def may_be_large(history: History) -> bool:
    """Whether the steps may be too large for the loss: the newest known update was `RAISING_UPDATE` of the weights of
    some layer, or would be at the present learning rate; also where none is known.
    """
    backs, rates = update_samples(history)[-1:], history.scalar("lr", RECENT_RECORDS)
    if not len(backs) or not is_own(history, RECENT_RECORDS)[-backs[0]]:
        return True
    moved = float(np.fmax.reduce(relative_updates(history, backs)[0], initial=np.nan))
    if rates[-1] > rates[-backs[0]] > 0:
        moved *= float(rates[-1] / rates[-backs[0]])
    return not moved < RAISING_UPDATE


def rate_text(history: History, *, back: int = 1) -> str:
    """' (lr=0.3, 100 times that of 20 steps before)' as of the record `back` from the end, empty where not known."""
    rates, momentum = history.scalar("lr", back + 19), history.number("momentum", back=back)
    if not rates[-back] > 0:
        return ""
    rates = np.where(is_own(history, back + 19, of=back), rates, np.nan)[: len(rates) + 1 - back]
    said, lowest = f"lr={number_text(rates[-1], 3)}", float(np.nanmin(rates))
    if (jump := rate_jump(history, back=back, of=back)) is not None and jump.rate > rates[-1]:
        said += f", after lr={number_text(jump.rate, 3)}, {ratio_text(np.log10(jump.ratio))} times the rate before it"
    elif rates[-1] > RATE_JUMP_RATIO * lowest > 0:
        then = back + len(rates) - 1 - int(np.flatnonzero(rates == lowest)[-1])
        distance = distance_text(history, then, until=back)
        said += f", {ratio_text(np.log10(rates[-1] / lowest))} times that of {distance} before"
    if momentum >= LONG_MOMENTUM:
        summed = f"the gradients of {1 / (1 - momentum):.0f} steps" if momentum < 1 else "all gradients since the first"
        said += f", momentum={number_text(momentum, 4)}, which adds up {summed}"
    return f" ({said})"


def rate_remedy(history: History, *, back: int = 1) -> str:
    """The remedy where steps are too large from the record `back` from the end on: a value that was measured."""
    if (jump := rate_jump(history, back=back, of=back)) is not None:
        return jump.remedy
    return measured_remedy(history, back) or _smaller_rate_remedy(history, back)


def measured_remedy(history: History, back: int) -> str:
    """What makes the steps too large, passes that are added up or long momentum; or else the rate at which they were
    sane, or at which the first would have been; empty where nothing is known.
    """
    if (passes := passes_in_steps(history, of=back)) is not None:
        return (
            f"loss / N before each of a step's N backward passes, which are added up: N is {passes} at least. Where it "
            "is divided already, a smaller lr."
        )
    if history.number("momentum", back=back) >= LONG_MOMENTUM:
        return "momentum=0.9 in configure_optimizers."
    rates, backs = history.scalar("lr", RECENT_RECORDS), update_samples(history)
    if not len(backs) or not is_own(history, RECENT_RECORDS, of=back)[-backs[-1]]:
        return ""
    backs = backs[backs >= back]
    if not rates[-back] > 0:  # that of the first parameter group
        return ""
    known, moved = rates[-backs], np.fmax.reduce(relative_updates(history, backs), axis=1, initial=np.nan)
    lower = (known > 0) & (known < LOWER_RATE_SHARE * rates[-back]) & (moved <= SANE_SHARE)
    # a network that is dead by then moves little at a rate that has killed it
    lower &= known <= np.fmin.reduce(known[moved > SANE_SHARE], initial=np.inf)
    if lower.any():
        last = int(np.flatnonzero(lower)[-1])
        as_then = f"as at step {history.steps[-backs[last]]}, which moved the weights by up to"
        most = f"{number_text(moved[last], 1)} of their size"
        return f"lr={number_text(known[last])} in configure_optimizers, {as_then} {most}."
    at_this_rate = np.flatnonzero((known == rates[-back]) & np.isfinite(moved))
    if not len(at_this_rate) or not moved[at_this_rate[0]] > SANE_SHARE:
        return ""
    first = int(at_this_rate[0])
    share, step, momentum = GOOD_SHARE, history.steps[-backs[first]], history.number("momentum", back=back)
    summed = ""
    if momentum > 0 and step == 0:  # later steps have its sum in them
        share *= 1 - momentum
        summed = f", and momentum={number_text(momentum, 2)} adds up {1 / (1 - momentum):.0f} such steps"
    then = f"step {step} would have moved the weights by up to {number_text(share, 1)} of their size{summed}"
    return f"lr={number_text(rates[-back] * share / moved[first], 1)} in configure_optimizers: {then}."


def _smaller_rate_remedy(history: History, back: int) -> str:
    """A lower rate, or clipping at the usual norm before, where nothing clips yet."""
    smaller = "a smaller lr in configure_optimizers"
    if (limit := clipping_limit(history, of=back)) is not None:
        return f"{smaller}: gradients are clipped to a norm of {number_text(limit)} already."
    usual = usual_gradient_norm(history, back=back)
    if usual is None:
        return f"{smaller}, with warm-up."
    return f"{smaller}, or Trainer(gradient_clip_val={number_text(usual)}), the usual norm before."


def clipping_limit(history: History, *, of: int = 1) -> float | None:
    """The highest total norm that clipping has left lately of the optimizer of the record `of` from the end; None where
    it left every gradient as it was, and where a loss scale may have been removed.
    """
    norms, used = (history.window(name, CLIPPED_RECORDS, sites=0) for name in ("grad_norm", "grad_norm_clipped"))
    own = is_own(history, CLIPPED_RECORDS, of=of)
    clipped = own & np.isfinite(norms) & (used > 0) & (used < CLIPPED_SHARE * norms)
    for row in np.flatnonzero(clipped):
        clipped[row] = not removed_scale(history, back=len(own) - int(row))
    left = used[clipped]
    if not len(left) or (may_be_scaled(history) and np.ptp(left) > SAME_LIMIT * left.max()):
        return None
    return float(left.max())


def usual_gradient_norm(history: History, *, back: int) -> float | None:
    """The median of one optimizer's finite total norms in the `CLIPPED_RECORDS` records before the one `back` from the
    end; None where there are none, and where they may hold a loss scale.
    """
    if may_be_scaled(history):
        return None
    n = CLIPPED_RECORDS + back
    before = history.window("grad_norm", n, sites=0)[:-back][is_own(history, n, of=back)[:-back]]
    before = before[np.isfinite(before)]
    return float(np.median(before)) or None if len(before) else None


def scale_in_use(history: History, *, back: int) -> float:
    """The loss scale that gradients still had as the optimizer used them, at the record `back` from the end; 0 without
    one.
    """
    if history.number("scaled", back=back) != 1:
        return 0.0
    intended, used = _gradients(history, back)
    return remaining_scale(used, intended, any_factor=True)


def removed_scale(history: History, *, back: int) -> float:
    """The loss scale that gradients had as they were measured at the record `back` from the end, and not as the
    optimizer used them, because the loop did not say that it has a scaler; 0 without one.
    """
    return remaining_scale(*_gradients(history, back))


def may_be_scaled(history: History) -> bool:
    """Whether gradients may hold a loss scale, as they are measured, that is not known: lately it was removed."""
    if history.number("scaled") == 1:
        return False
    norms, used = (history.window(name, CLIPPED_RECORDS, sites=0) for name in ("grad_norm", "grad_norm_clipped"))
    shorter = np.flatnonzero(used < CLIPPED_SHARE * norms)[-EFFECT_RECORDS:]
    return any(removed_scale(history, back=len(norms) - row) for row in shorter.tolist())


def _gradients(history: History, back: int) -> tuple[Floats, Floats]:
    """The norms of gradients as interventions left them, and as the optimizer used them, at the record `back` from the
    end: shape [sites] each.
    """
    norms, factors, used = (history.row(name, back=back) for name in ("grad_norm", "clip_factor", "grad_norm_clipped"))
    with np.errstate(invalid="ignore"):  # an infinite gradient times 0
        return norms * np.where(np.isnan(factors), 1.0, factors), used


def summed_passes(history: History, *, of: int = 1) -> int | None:
    """Of how many backward passes, at least, a step's gradient is the sum; None where it is of few, or of losses that
    the Trainer has divided. Whether a loop of the user's own has divided them is not known.

    The norm of a sum of N vectors is at most sqrt(N) times the root of the sum of their squared norms, which is the
    norm of what has arrived (Cauchy and Schwarz).
    """
    norms, arrived = (history.window(name, CLIPPED_RECORDS, sites=0) for name in ("grad_norm", "arrived_norm"))
    stale = history.scalar("stale", CLIPPED_RECORDS)
    if history.number("accumulate") > 1 or (stale > 0).any():
        return None
    own = is_own(history, CLIPPED_RECORDS, of=of)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = (norms[own] / arrived[own]) ** 2
    least = least[np.isfinite(least)]
    # the step before may have been the only one that was sampled
    return int(np.ceil(least.max() - 1e-6)) if len(least) and LEAST_PASSES <= least.max() <= MOST_PASSES else None


def passes_in_steps(history: History, *, of: int = 1) -> int | None:
    """The same; None, too, where a sum makes no longer steps than a mean."""
    passes = summed_passes(history, of=of)
    return passes if passes is not None and _steps_as_sgd(history, of) else None


def _steps_as_sgd(history: History, of: int) -> bool:
    """Whether steps are as long as those of SGD, the rate times the gradient, in all layers, as far as is known lately
    of the optimizer of the record `of` from the end. Adam divides by the size of the gradient.
    """
    own = is_own(history, CLIPPED_RECORDS, of=of)
    layers, n = history.layout.layers, len(own)
    norms, used, weights, updates = (
        history.window(name, n)[own][:, layers]
        for name in ("grad_norm", "grad_norm_clipped", "weight_norm", "update_ratio")
    )
    rates, highest = (history.scalar(name, n)[own, None] for name in ("lr", "lr_highest"))
    with np.errstate(divide="ignore", invalid="ignore"):
        longer = updates * weights / (rates * np.where(np.isnan(used), norms, used))
    known = np.isfinite(longer) & (longer > 0)
    if not known.any():
        return True
    most = SGD_TOLERANCE / max(1e-3, 1 - np.nan_to_num(history.number("momentum", back=of)))
    spread = float(np.fmax.reduce(highest / rates, axis=None, initial=1.0))
    longer = median(np.where(known, longer, np.nan))
    return bool(((longer >= 1 / most) & (longer <= most * spread))[~np.isnan(longer)].all())
