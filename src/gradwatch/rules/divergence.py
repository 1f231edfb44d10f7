"""Divergence: steps as large as the weights themselves, or a loss that runs away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text
from gradwatch.core.history import OPENING, History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import MEASURED, TOTAL, Floats, Mask, Sites
from gradwatch.rules.evidence.baseline import LEVEL_RECORDS, first_steps_text, largest_first_loss, was_learnt
from gradwatch.rules.evidence.binary_targets import has_outside_targets
from gradwatch.rules.evidence.jumps import LARGE_UPDATE, GradientJump, gradient_jump, grew_alike, last_jump
from gradwatch.rules.evidence.learning_rates import (
    EFFECT_RECORDS,
    LONG_MOMENTUM,
    MAXIMIZES,
    MAXIMIZES_REMEDY,
    RATE_JUMP_RATIO,
    RateJump,
    maximizes,
    may_be_large,
    passes_in_steps,
    rate_jump,
    rate_remedy,
    rate_text,
    scale_in_use,
)
from gradwatch.rules.evidence.recent_rows import ROUNDING, RecentRows
from gradwatch.rules.evidence.records import is_alone, is_own, own_losses, own_records
from gradwatch.rules.evidence.samples import RECENT_RECORDS, own_sample_backs
from gradwatch.rules.evidence.weights import (
    WEIGHT_FLOOR_SHARE,
    has_norm_layers,
    outside_writes,
    relative_updates,
    update_samples,
    usual_weight_norms,
)
from gradwatch.rules.evidence.wording import capitalized, distance_text, ratio_text
from gradwatch.rules.rule import CheckedRule

LOSSES_AFTER_STEP = 4
"""Latest losses, all but one of which are raised after a large step whose effect lasts. Measured: tiny weights before
a norm recover in two, and the loss of a transformer that diverges may dip once."""

STEP_RISE_SHARE = 0.3
"""Share of itself by which the loss has risen after such a step. Measured: with 50 layers and batch norms, which the
first step moves by 10 to 200 times their size and no more, losses go up by 0.16; with a rate a hundred times too high
they go up by 0.6 to 1.2."""

RISE_SHARE = 0.1
"""Share of itself by which the loss has risen where the scale of the weights matters. Judgement."""

LONG_LEVEL_RECORDS = 20
"""Losses whose median is a level, where the whole run is compared. Judgement."""

UNLEARNT_RATIO = 1.25
"""Ratio of the loss to its least level so far above which the model has lost what it had learnt. Judgement."""

JUMP_RECORDS = 15
"""Records back to a jump of the learning rate since which the loss has been up. Judgement."""

UP_RECORDS = 10
"""The last of them, at which the loss has been over all of its first ones. Judgement: a restart that does no lasting
harm is back sooner."""

SHIFT_RISE = 3.0
"""Times the first loss of a shift above which it has risen since. Judgement: losses of single batches differ by 2."""

ANEW_RECORDS = 20
"""Losses after a shift by which the later half is lower than the earlier, if they are learnt anew. Judgement."""

STILL_LEARNT_SHARE = 0.5
"""Below this share of its first level the loss still counts as learnt. Judgement."""


BEGUN_SHARE = 0.3
"""Share of the usual norm of a layer's weights, from which on it did not begin near 0. Judgement: torch's start has 0.6
or more."""

BLOWN_RATIO = 10.0
"""Ratio of loss and gradient to those before the step that has thrown the weights. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence(CheckedRule):
    """A step moved a layer's weights by more than their own size; or the loss left its first level for good, or was far
    over it for once in the first steps.
    """

    name: ClassVar[str] = "divergence"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm", "weight_norm", "update_ratio"})

    update: float = 3.0
    """Limit for the update of one step, relative to the weights. Prototype; healthy trainings of the zoo reach 0.7."""
    often: float = 1.0
    """The same for updates that repeat. Prototype."""
    times: int = 2
    """Number of such updates that count as repeated. Prototype."""
    sampled_steps: int = 10
    """Number of latest sampled steps in which they are counted. Prototype."""
    loss: float = 10.0
    """Limit for |loss|, relative to the highest |loss| of the first records. Judgement: a shift in the data makes it 3
    (zoo)."""
    gradient: float = 3.0
    """Total gradient, relative to its first level, that counts as grown with the loss. Prototype."""
    first_records: int = 10
    """Number of first records for the first level of loss and gradient. As in `Exploding`."""
    rise_records: int = 50
    """Records within which the loss rises. Judgement: with a moving target it rises more slowly."""

    blow_up: float = 1000.0
    """Ratio of loss and total gradient to their first values from which one loss of the first steps is enough, right
    after a step that moved a layer far. Judgement."""
    early_records: int = 20
    """First records in which that is looked for. As `Spike.warm_up`: later ones are that rule's."""

    growth: float = 3.0
    """Limit for the growth of weights while nothing is learnt, as a ratio of norms. Judgement: from torch's default
    initialization, trainings that learn add half of the norm (measured)."""
    growth_records: int = 300
    """Records within which the weights grow. Judgement: with moving targets it takes thousands."""
    grown_layers_share: float = 0.5
    """Share of the layers that grow. As in `Collapse`."""
    falling_growth: float = 2.0
    """Growth of the weights of every layer, as a ratio of norms, with a loss that has no minimum. Measured: with a
    wrong sign all layers grow alike; where a critic's values grow, or a density narrows, the layer that grows least has
    1.4."""

    def suspects(self, rows: RecentRows) -> Mask:
        """A step as large as the weights lately, a jump of the rate, a loss far over the optimizer's first ones, or a
        sample of the weights.
        """
        suspected = rows.nowhere.copy()
        history, n = rows.history, len(rows.history)
        losses, rates, optimizers = history.scalar("loss", n), history.scalar("lr", n), history.optimizers(n)
        sizes = np.where(np.isfinite(losses), np.abs(losses), np.nan)
        for optimizer in set(rows.block.optimizers.tolist()):
            own, mine = np.flatnonzero(optimizers == optimizer), rows.block.optimizers == optimizer
            count, first = np.count_nonzero(mine), own[: own.searchsorted(n - rows.capacity) + 1]
            if not (sizes[own[-count - LEVEL_RECORDS :]] < self.loss * sizes[first].min()).all():
                suspected |= mine & ~(rows.totals < self.gradient * rows.openings[:, 0])
            known = rates[own[-count - JUMP_RECORDS - 1 :]]
            jumped = (known[1:] >= RATE_JUMP_RATIO * ROUNDING * known[:-1]) & (known[:-1] > 0)
            suspected |= mine & jumped.any()
        updates, backs = history.samples("update_ratio", rows.count + EFFECT_RECORDS)
        for back in backs[(updates >= min(self.often, self.update)).any(axis=1)].tolist():
            after = rows.count + 1 - back
            suspected[max(0, after) : max(0, after + EFFECT_RECORDS)] = True
        if "weight_norm" in rows.fresh and not has_norm_layers(rows.layout):
            limits = self.growth * ROUNDING * rows.range_over_samples("weight_norm")[0]
            suspected |= (rows.values("weight_norm")[:, rows.layout.layers] >= limits).any(axis=1)
        return suspected

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if 1 < history.newest("update_ratio") <= EFFECT_RECORDS + 1 and (found := self._after_large_steps(history)):
            return [found]
        if found := self._blew_up(history):
            return [found]
        known = history.has("loss") and len(history) >= self.first_records + LEVEL_RECORDS
        start = largest_first_loss(history, self.first_records) if known else 0.0
        if known and (found := self._after_rate_jump(history, abs(start))):
            return [found]
        if found := self._weights_grew(history):
            return [found]
        return self._loss_grew(history, start) if known else None

    def _after_large_steps(self, history: History) -> Finding | None:
        """Steps as large as the weights, since which the loss has not been better throughout."""
        layout, backs = history.layout, update_samples(history)[-self.sampled_steps :]
        moved = np.nan_to_num(relative_updates(history, backs), nan=0.0)
        lately = backs <= EFFECT_RECORDS + 1
        often = (moved[lately] >= self.often).any(axis=0) & ((moved >= self.often).sum(axis=0) >= self.times)
        now = moved[lately].max(axis=0, initial=0.0)
        once = now >= self.update
        chosen, limit = (once, self.update) if once.any() else (often, self.often)
        if not chosen.any():
            return None
        leap = int(np.flatnonzero(lately & (moved >= min(self.often, self.update)).any(axis=1))[0])
        back = int(backs[leap])
        rise = _rise(history, back)
        if rise is None and not once.any():
            return None
        # before a norm the size of weights is arbitrary: a step as large as they are sets it, and most often no more
        if rise is not None and not _worse(*rise, passing=has_norm_layers(layout)):
            return None
        worst, names = float(now[chosen].max()), layout.names(layout.layers[chosen])
        first = np.where(chosen, moved[leap], 0.0)
        origin = int(first.argmax()) if first.any() else int(now.argmax())
        layer = layout.names([layout.layers[origin]])[0]
        theirs = moved[lately][:, chosen]
        together = ((theirs.min(axis=1) >= limit) & (theirs.max(axis=1) >= worst)).any()
        between = int(backs[leap - 1] - backs[leap]) if leap else RECENT_RECORDS  # records since the sample before
        why = _why_long(history, back, records=max(EFFECT_RECORDS, between))
        message = (
            f"{'One step' if together else 'Steps'} moved the weights of {name_text(names)} by "
            f"{'up to ' * (len(names) > 1)}{number_text(worst)} times their own size{_loss_text(rise)}; a hundredth is "
            f"usual. {why.cause}"
        )
        headline = why.headline or f"one step was {number_text(worst)} times the size of the weights"
        return Finding(self.name, Severity.ERROR, layer, names, worst, limit, message, why.remedy, why.onset, headline)

    def _blew_up(self, history: History) -> Finding | None:
        """A loss of the first steps that is far over the first one, as its gradient is, right after a large step. It
        need not stay there: the weights have been thrown.
        """
        if not history.whole or maximizes(history):
            return None
        own = own_records(history)
        if not 1 < len(own) <= self.early_records:
            return None
        n = len(history)
        losses, norms = history.scalar("loss", n)[-own], history.window("grad_norm", n, sites=0)[-own]
        if not (np.isfinite([losses, norms]).all() and losses[0] and norms[0] > 0):
            return None
        times = np.array([losses / abs(losses[0]), norms / norms[0]])
        value, moved, back = float(times[:, -1].min()), relative_updates(history, own[[-2]])[0], int(own[-2])
        layout, layers = history.layout, history.layout.layers
        # what began near 0 may grow many times over
        begun = history.at("weight_norm", own[[-2]])[0, layers] >= BEGUN_SHARE * usual_weight_norms(layout)[layers]
        chosen = begun & (moved >= LARGE_UPDATE)
        if value < self.blow_up or (times[:, -1] < BLOWN_RATIO * times[:, -2]).any() or not chosen.any():
            return None
        names, moved = layout.names(layers[chosen]), moved[chosen]
        layer, worst = names[moved.argmax()], float(moved.max())
        why = _why_long(history, back, records=EFFECT_RECORDS)
        first, now = (number_text(loss, 3) for loss in losses[[0, -1]])
        message = (
            f"The loss went from {first} at first to {now}, and the gradient from {number_text(norms[0])} to "
            f"{number_text(norms[-1])}, right after a step that moved the weights of {name_text(names)} by "
            f"{'up to ' * (len(names) > 1)}{number_text(worst)} times their size; a hundredth is usual. {why.cause}"
        )
        headline = why.headline or f"the loss went from {first} to {now} in the first steps"
        severity, limit = Severity.WARNING, self.blow_up
        return Finding(self.name, severity, layer, names, value, limit, message, why.remedy, why.onset, headline)

    def _after_rate_jump(self, history: History, first: float) -> Finding | None:
        """The loss beyond its `first` level, right after a jump of the learning rate: that need not be waited for. Or
        over that level for long since then, where it was under it when the rate jumped.
        """
        now, limit = history.number("loss"), self.loss
        # a loss was there before its record's rate moved anything
        jump = rate_jump(history, back=2) if np.inf > abs(now) >= limit * first > 0 else None
        if jump is None:
            jump, limit = _jump_since_up(history, first), UNLEARNT_RATIO
        if jump is None:
            return None
        message = (
            f"The loss is {number_text(now, 3)}, {_times_text(abs(now) / first)} the largest of "
            f"{first_steps_text(history, self.first_records)} ({number_text(first, 3)}), "
            f"{'at least ' * jump.after_gap}{distance_text(history, jump.back)} after the learning rate jumped to "
            f"{number_text(jump.rate, 3)}, {_times_text(jump.ratio)} that of the "
            f"{'measured ' * jump.after_gap}step before{_overwritten_text(history, jump.back)}."
        )
        value, text = abs(now) / first, jump.text
        return Finding(self.name, Severity.ERROR, TOTAL, (), value, limit, message, jump.remedy, jump.back, text)

    def _weights_grew(self, history: History) -> Finding | None:
        """Weights that grew many times over while nothing was learnt, as the latest record, a sample, shows."""
        if history.newest("weight_norm") != 1 or (found := _weight_growth(history, self.growth_records)) is None:
            return None
        (ratios, backs), layout = found, history.layout
        far = ratios >= self.growth
        if not np.count_nonzero(far[-1]) >= max(self.grown_layers_share * np.count_nonzero(~np.isnan(ratios[-1])), 1):
            return None
        # small steps that are soon forgotten follow the gradient: where the loss grows with them, its targets moved
        if not (history.number("momentum") >= LONG_MOMENTUM or may_be_large(history)):
            return None
        if (levels := _loss_levels(history)) is None:
            return None
        first, least, now = levels
        if not now > max(UNLEARNT_RATIO * least, STILL_LEARNT_SHARE * first) > 0:
            return None
        # the first layer to grow so far began it; the first sample is not over itself
        onset = int(backs[np.flatnonzero(~far.any(axis=1))[-1] + 1])
        furthest = int(np.nanargmax(ratios[-1]))
        growth, layer = float(ratios[-1, furthest]), layout.sites[layout.layers[furthest]].name
        names = layout.names(layout.layers[far[-1]])
        went = f"from {number_text(least, 3)} to {number_text(now, 3)}"
        carried = f"the steps carry the weights away{rate_text(history, back=onset)}"
        if outside_writes(history, layout.layers[[furthest]], backs, grew=True).any():
            carried = "single steps were large, or something else wrote the weights"
        message = (
            f"The weights of {name_text(names)} have grown {'up to ' * (len(names) > 1)}{number_text(growth)} times in "
            f"{distance_text(history, int(backs[0]))}, {f'those of layer {layer} most, ' * (len(names) > 1)}and the "
            f"loss went back {went}: {carried}."
        )
        headline = f"the weights grew {number_text(growth)} times, the loss went {went}"
        remedy = rate_remedy(history, back=onset)
        return Finding(self.name, Severity.ERROR, layer, names, growth, self.growth, message, remedy, onset, headline)

    def _loss_grew(self, history: History, start: float) -> Sequence[Finding] | None:
        """The loss far over, or far under, its first level, within few steps, and the gradient grown with it. `start`:
        as `largest_first_loss` gives it.
        """
        first = abs(start)
        if history.total < self.gradient * history.opening[0]:
            return []
        own = own_records(history)
        if len(own) < self.first_records + LEVEL_RECORDS:
            return None
        losses, norms = history.series("loss")[-own], history.series("grad_norm")[-own]
        now = float(np.median(losses[-LEVEL_RECORDS:]))
        if not np.isfinite(now):
            return None  # `nonfinite` has it
        if abs(now) < self.loss * first:
            return []
        early, late = norms[: self.first_records], norms[-LEVEL_RECORDS:]
        level = float(np.median(early[np.isfinite(early)])) if np.isfinite(early).any() else 0.0
        steeper = float(np.median(late)) / level if level > 0 else 0.0
        # down without bound: there a good loss differs from a bad one by its gradient only
        wanted = self.gradient if now > 0 else self.gradient * self.loss
        if not steeper >= wanted:
            return []
        before = np.abs(losses[-self.rise_records - LEVEL_RECORDS : -LEVEL_RECORDS])
        calm = float(np.quantile(before[np.isfinite(before)], 0.25)) if np.isfinite(before).any() else 0.0
        fast = abs(now) >= self.loss * calm
        # that of a critic falls fast, until its adversary has caught up
        if not ((fast and (now > 0 or is_alone(history))) or (now <= 0 and self._swollen(history))):
            return None  # still far off, by a change that is long over or that was slow
        value = abs(now) / first if first > 0 else 1e39  # from nothing at all
        onset = _excursion_onset(history, self.loss * first)
        far = (
            f"{number_text(now, 3)}, {'in size ' * (min(start, now) < 0)}{_times_text(value)} the largest of "
            f"{first_steps_text(history, self.first_records)} ({number_text(start, 3)}), and the gradient is "
            f"{_times_text(steeper)} its first level"
        )
        went, headline = "is", f"the loss went from {number_text(start, 3)} to {number_text(now, 3)}"
        if maximizes(history) and now > start:
            cause, remedy = MAXIMIZES, MAXIMIZES_REMEDY
        elif now > 0 or maximizes(history):
            if (why := _why_high(history, onset)) is None:
                return []
            cause, remedy, headline, onset = why.cause, why.remedy, why.headline or headline, why.onset
        else:
            went, headline = "falls without bound, to", f"the loss falls without bound, to {number_text(now, 3)}"
            cause = (
                "what is minimised has no minimum. Most often the sign of the loss is wrong, nll_loss gets logits "
                "without a log_softmax, or a binary cross entropy gets targets outside 0 to 1, as masks of 255."
            )
            remedy = (
                "return the loss, not its negative, from training_step; a reward or a log-likelihood needs the minus, "
                "nll_loss a log_softmax before it, and a binary cross entropy targets from 0 to 1."
            )
            if has_outside_targets(history):
                cause = "what is minimised has no minimum, as a binary cross entropy gets targets outside 0 to 1."
                remedy = "targets from 0 to 1 for the binary cross entropy."
        message = f"The loss {went} {far}: {cause}"
        return [Finding(self.name, Severity.ERROR, TOTAL, (), value, self.loss, message, remedy, onset, headline)]

    def _swollen(self, history: History) -> bool:
        """Whether the weights of all layers, two or more, have grown: what has no minimum takes all of them along.

        That a loss falls for long is no evidence: as a density narrows, or the values of a critic grow, it may.
        """
        found = _weight_growth(history, RECENT_RECORDS)
        ratios = found[0][-1][~np.isnan(found[0][-1])] if found is not None else np.empty(0)
        return len(ratios) > 1 and bool(ratios.min() >= self.falling_growth)


def _rise(history: History, back: int) -> tuple[Floats, Floats] | None:
    """The losses up to the record `back` from the end, and those since; None where they are not known.

    With several optimizers each has its own loss: then they are not.
    """
    n = LEVEL_RECORDS + back - 1
    series = history.scalar("loss", n)
    before = series[: 1 - back]
    before = before[np.isfinite(before)]
    return (before, series[1 - back :]) if len(before) and is_own(history, n).all() else None


def _worse(before: Floats, after: Floats, *, passing: bool) -> bool:
    """Whether a loss rose out of its range; where the effect of a step may be a `passing` one, whether it stays up."""
    if not np.isfinite(after).all():
        return True
    highest, size = before.max(), float(np.median(np.abs(before)))
    if not passing:
        return bool(after.max() > highest + RISE_SHARE * size)
    risen = after[-LOSSES_AFTER_STEP:] > highest + STEP_RISE_SHARE * size
    return bool(np.count_nonzero(risen) >= LOSSES_AFTER_STEP - 1)


class _Why(NamedTuple):
    """Why steps are so long, or the loss is so high."""

    cause: str
    remedy: str
    headline: str
    """The jump that made it so, as a clause; empty without one."""
    onset: int


def _why_long(history: History, back: int, *, records: int) -> _Why:
    """Why the step at the record `back` from the end was so long. `records`: in which the rate may have jumped."""
    if scale := scale_in_use(history, back=back):
        cause = f"The optimizer used gradients that still had the loss scale, {scale:.0f} times those measured."
        remedy = "scaler.step(optimizer), which divides by the loss scale, in place of optimizer.step()."
        return _Why(cause, remedy, "", back)
    jump = last_jump(history, rate=back, gradient=back, of=back, records=records)
    overwritten = _overwritten_text(history, back, of=back)
    if isinstance(jump, RateJump):
        distance = distance_text(history, jump.back, until=back)
        when = f", {'at least ' * jump.after_gap}{distance} before" if jump.back > back else ""
        return _Why(f"{capitalized(jump.text)}{when}{overwritten}.", jump.remedy, jump.text, jump.back)
    if jump is not None:
        onset = back - 1 if jump.back == back > 1 else back  # that batch itself is a spike
        return _Why(capitalized(jump.cause), jump.remedy, jump.text, onset)
    passes = passes_in_steps(history, of=back)
    why = f"the learning rate is too high for this model and loss{rate_text(history, back=back)}"
    cause = f"{capitalized(why if passes is None else _passes_text(passes))}{overwritten}."
    return _Why(cause, rate_remedy(history, back=back), "", back)


def _overwritten_text(history: History, back: int, *, of: int = 1) -> str:
    """': what was learnt is overwritten', where something was learnt before the record `back` from the end."""
    return ": what was learnt is overwritten" if was_learnt(history, back=back + 1, of=of) else ""


def _passes_text(passes: int) -> str:
    return f"each step adds up the gradients of {passes} backward passes or more"


def _loss_text(rise: tuple[Floats, Floats] | None) -> str:
    """What the loss did since; empty where that is not known."""
    if rise is None:
        return ""
    before, after = rise
    if not np.isfinite(after).all():
        return f", and the loss went from {number_text(np.median(before), 3)} to no finite number"
    return f", and the loss went from {number_text(np.median(before), 3)} to {number_text(after.max(), 3)}"


def _times_text(ratio: float) -> str:
    return f"{ratio_text(np.log10(ratio))} times"


def _jump_since_up(history: History, first: float) -> RateJump | None:
    """The jump of the rate since which a loss that had been learnt has been over its `first` level, and stays there."""
    losses = history.scalar("loss", JUMP_RECORDS + 1)
    if not (losses[-UP_RECORDS:] >= UNLEARNT_RATIO * first).all():
        return None
    if not is_own(history, JUMP_RECORDS + 1).all() or (jump := rate_jump(history, records=JUMP_RECORDS)) is None:
        return None
    # a loss that was up before the first step at that rate has another cause, such as other data
    return jump if 0 < losses[-jump.back] < first and was_learnt(history, back=jump.back + 1) else None


def _weight_growth(history: History, records: int) -> tuple[Floats, Sites] | None:
    """The norm of each layer's weights at the samples within the last `records`, shape [samples, layers], over what it
    was at the first of them; and the positions of these. NaN for layers that do not train, or began near zero.

    None where it is not known, or where a norm makes the size of weights arbitrary.
    """
    layout, backs = history.layout, own_sample_backs(history, "weight_norm")
    backs = backs[backs <= records + 1]
    if not len(backs) or has_norm_layers(layout):
        return None
    norms = history.at("weight_norm", backs)[:, layout.layers]
    first = norms[0]
    trained = history.codes(1)[0, layout.layers] == MEASURED
    trained &= first >= WEIGHT_FLOOR_SHARE * usual_weight_norms(layout)[layout.layers]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(trained, norms / first, np.nan), backs


def _loss_levels(history: History) -> tuple[float, float, float] | None:
    """The loss at first, at its least, and now: medians of `LONG_LEVEL_RECORDS`. None where unknown or too short."""
    own = own_losses(history, len(history))
    if len(own) < max(3 * LONG_LEVEL_RECORDS, OPENING):
        return None
    count = len(own) // LONG_LEVEL_RECORDS
    levels = np.median(own[: count * LONG_LEVEL_RECORDS].reshape(count, LONG_LEVEL_RECORDS), axis=1)
    return float(levels[0]), float(levels.min()), float(np.median(own[-LONG_LEVEL_RECORDS:]))


def _excursion_onset(history: History, limit: float) -> int:
    """The position, from the end of the history, of the first loss over `limit` in the latest excursion: one that ends
    where as many are under it as make up a level.
    """
    own = own_records(history)
    far = np.flatnonzero(np.abs(history.series("loss")[-own]) >= limit)
    breaks = np.flatnonzero(np.diff(far) > LEVEL_RECORDS)
    return int(own[far[breaks[-1] + 1 if len(breaks) else 0]])


def _why_high(history: History, onset: int) -> _Why | None:
    """Why the loss is far over its first level since the record `onset` from the end, the cause without a capital; None
    where that is no divergence.
    """
    passes, jump = passes_in_steps(history), last_jump(history, rate=onset, gradient=1)
    if not maximizes(history):
        if not isinstance(jump, RateJump) and (shift := _shift(history, onset)):
            if _learns_anew(history, onset):
                return None
            jump = shift
        if jump is None and passes is None and not may_be_large(history):
            return None  # small steps do not raise a loss so far: targets grew, such as rewards that were found
    if not isinstance(jump, GradientJump):
        cause = f"the steps are too large{rate_text(history, back=onset)}"
        cause += ", or the loss is a sum where it should be a mean." if passes is None else f": {_passes_text(passes)}."
        if jump is None:
            return _Why(cause, rate_remedy(history, back=onset), "", onset)
        return _Why(cause, jump.remedy, jump.text, jump.back)
    cause, remedy = jump.cause, jump.remedy
    if grew_alike(history, jump.back):
        cause = (
            f"{cause.rstrip('.')}, and the loss and the gradients of all layers grew by about the same factor there, "
            "as where a sum replaces a mean in the loss or a weight of it changes."
        )
        remedy = f"the reduction and weights of the loss as before that batch, or {remedy}"
    return _Why(cause, remedy, jump.text, min(onset, max(1, jump.back - 1)))  # that batch itself is a spike


def _shift(history: History, onset: int) -> GradientJump | None:
    """The jump of the gradient at the record `onset` from the end, where the loss was up before the step of that batch
    and after small ones: other data or targets, if that step did no more.
    """
    jump = gradient_jump(history, back=onset)
    if jump is None or jump.back != onset or jump.threw or grew_alike(history, onset) or may_be_large(history):
        return None
    return jump


def _learns_anew(history: History, onset: int) -> bool:
    """Whether the loss has not risen since the record `onset` from the end, nor stayed, as far as that is known."""
    losses = own_losses(history, onset)
    if np.median(losses[-LEVEL_RECORDS:]) > SHIFT_RISE * losses[0]:
        return False
    earlier, later = losses[: ANEW_RECORDS // 2], losses[-ANEW_RECORDS // 2 :]
    return len(losses) <= ANEW_RECORDS or bool(np.median(later) < np.median(earlier))
