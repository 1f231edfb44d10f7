"""Tampered gradients: those of a layer's parameters do not match the signal that flows back through the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text
from gradwatch.core.history import History
from gradwatch.core.record import MEASURED, Floats, Layout, Mask, Sites
from gradwatch.rules.evidence.recent_rows import ROUNDING, RecentRows
from gradwatch.rules.evidence.samples import onset_of, own_samples, throughout
from gradwatch.rules.evidence.wording import ratio_text
from gradwatch.rules.rule import CheckedRule

SAME_SIZE_DEX = 0.02
"""Dex by which the norms of two correct gradients may differ: bfloat16 rounds to 0.002. Judgement."""

CONSTANT_FACTOR_DEX = 0.05
"""Dex by which a constant factor may seem to vary: two such differences. Judgement."""

SAME_DIRECTION_COSINE = 0.99
"""Cosine from which two gradients have the same direction. Judgement: bfloat16 has 0.9999."""

OPPOSITE_COSINE = 0.9995
"""Minus the cosine from which one gradient is the opposite of another. Judgement; where a penalty balances the rest of
the loss, 0.998 occurs (measured)."""

EVENNESS = 0.999
"""Mean over root mean square of the magnitudes above zero, from which they are all the same."""

SAME_SIGNS_COSINE = 0.4
"""Cosine of signs with the gradient from which they are its signs, rather than those of the weights, as the gradient of
an absolute penalty has them. Judgement: for normal numbers it is 0.8."""

FEWEST_ELEMENTS = 4
"""With fewer elements a direction is easily chance: that of a single one is only its sign. Judgement."""

PAST_SAMPLES = 64
"""Samples in which the first of those in a row is searched; no more than five of them go by unnoticed. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tampered(CheckedRule):
    """Gradients that somebody rewrites between the backward pass and the optimizer.

    A bias's gradient has to be the sum of what flows back to its layer, whatever the loss is. Where at least half of
    all parameters keep to that, up to one factor for all of them (a loss scale, clipping), others are reported.
    What has no hook of others may still have a part that comes from elsewhere (a penalty, a second use): of such only
    exact multiples are reported. Smaller ones are where they are a constant multiple: clipping is none.
    """

    name: ClassVar[str] = "tampered"
    needs: ClassVar[frozenset[str]] = frozenset({"gradient_cosine", "gradient_dex", "gradient_evenness", "other_hooks"})

    cosine: float = 0.5
    """The sign counts as reversed at a cosine of minus this (prototype), and the direction as kept at a cosine of this
    (judgement)."""
    dex: float = 1.5
    """Decades by which a size is wrong. Prototype."""
    small: float = 0.5
    """A reversed gradient that is this many decades smaller than the others may be what a penalty on the weights leaves
    near its balance with the loss. Judgement."""
    records: int = 2
    """Samples in a row, if there is a hook and the case is exact. Judgement."""
    exact_records: int = 5
    """Samples in a row otherwise. Judgement."""
    intact_share: float = 0.5
    """Share of the parameters that have to be right before others are compared with them. Judgement."""

    def suspects(self, rows: RecentRows) -> Mask:
        """Samples with a gradient that is turned, or two whose sizes are off by that much from one another."""
        sampled, parameters = rows.fresh.get("gradient_cosine", rows.nowhere), rows.layout.parameters
        turned = (rows.values("gradient_cosine")[:, parameters] <= -min(self.cosine, OPPOSITE_COSINE)).any(axis=1)
        there = rows.values("gradient_dex")[:, parameters]
        with np.errstate(invalid="ignore"):  # of two infinite ones it is not known
            highest, lowest = (reduce(there, axis=1, initial=np.nan) for reduce in (np.fmax.reduce, np.fmin.reduce))
            within = highest - lowest < self.dex * ROUNDING
        return np.asarray(sampled & (turned | ~within))

    def __call__(self, history: History) -> Sequence[Finding] | None:
        found = own_samples(history, "gradient_cosine")
        if found is None:
            return None
        layout, backs = history.layout, found[1][-self.exact_records :]
        recent = {name: history.at(name, backs)[:, layout.parameters] for name in self.needs}
        held = history.codes(1)[-1, layout.parameters] == MEASURED
        cosines, dex, hooks = recent["gradient_cosine"], recent["gradient_dex"], recent["other_hooks"]
        weights, even = _weights(layout), recent["gradient_evenness"] >= EVENNESS
        off = dex - self._common(cosines, dex, hooks, held)
        # a penalty may be on weights only, and then biases say nothing of them
        off_kind = dex - np.where(
            weights,
            self._common(cosines, dex, hooks, held & weights),
            self._common(cosines, dex, hooks, held & ~weights),
        )
        hooked, many = hooks[-1] > 0, _many(layout)
        turned = held & self._turned(cosines, dex, off, off_kind, hooked, many)
        longer, shorter = self._longer(cosines, off, off_kind, even, hooked, many), self._shorter(cosines, off, many)
        resized = held & (longer | shorter) & ~turned
        return [
            self._finding(history, which, recent, off, found[1], turned=which is turned)
            for which in (turned, resized)
            if which.any()
        ]

    def _common(self, cosines: Floats, dex: Floats, hooks: Floats, among: Mask) -> Floats:
        """The factor that is common to what is right `among` the parameters, dex, shape [samples, 1]; NaN where too few
        agree on one.
        """
        common = np.full((len(dex), 1), np.nan)
        for row, (cosine, size, others) in enumerate(zip(cosines, dex, hooks, strict=True)):
            known = among & ~np.isnan(cosine)
            along = known & (cosine >= SAME_DIRECTION_COSINE)
            free = along & (others == 0)
            candidates = np.sort(size[free if free.any() else along])
            if not len(candidates):
                continue
            # the middle one; of two, the one that nothing was done to
            factor = min(candidates[(len(candidates) - 1) // 2], candidates[len(candidates) // 2], key=abs)
            intact = np.count_nonzero(along & (np.abs(size - factor) <= SAME_SIZE_DEX))
            if intact >= self.intact_share * np.count_nonzero(known):
                common[row] = factor
        return common

    def _turned(self, cosines: Floats, dex: Floats, off: Floats, off_kind: Floats, hooked: Mask, many: Mask) -> Mask:
        exact = (cosines <= -OPPOSITE_COSINE) & many
        about = (cosines <= -self.cosine) & (off_kind > -self.small)
        sure = throughout(exact, self.records) & _steady(dex[-self.records :])
        by_hook = hooked & (sure | throughout(about, self.exact_records))
        return by_hook | throughout(exact & (np.abs(off) <= SAME_SIZE_DEX), self.exact_records)

    def _longer(self, cosines: Floats, off: Floats, off_kind: Floats, even: Mask, hooked: Mask, many: Mask) -> Mask:
        exact = cosines >= SAME_DIRECTION_COSINE
        multiple = exact & (off >= self.dex)
        sure = multiple | (even & (cosines >= SAME_SIGNS_COSINE) & (off_kind >= self.dex))
        about = (off_kind >= self.dex) & (cosines >= self.cosine)
        by_hook = hooked & (throughout(sure, self.records) | throughout(about, self.exact_records))
        return by_hook | (many & throughout(multiple, self.exact_records) & _steady(off))

    def _shorter(self, cosines: Floats, off: Floats, many: Mask) -> Mask:
        multiple = (cosines >= SAME_DIRECTION_COSINE) & (off <= -self.dex)
        return many & throughout(multiple, self.exact_records) & _steady(off)

    def _finding(
        self, history: History, which: Mask, recent: dict[str, Floats], off: Floats, backs: Sites, *, turned: bool
    ) -> Finding:
        """`which`: the parameters whose gradients are `turned`, or else resized."""
        layout = history.layout
        latest = {name: rows[-1] for name, rows in recent.items()}
        names = layout.names(layout.parameters[which])
        layers = layout.names(np.unique(layout.owners[which]))
        # the farthest off is the one to be spoken of
        farthest = np.nanargmax(np.abs(np.nan_to_num(off[-1, which])) - latest["gradient_cosine"][which])
        spoken = int(np.flatnonzero(which)[farthest])
        name, layer = layout.sites[layout.parameters[spoken]].name, layout.sites[layout.owners[spoken]].name
        cosine, dex = float(latest["gradient_cosine"][spoken]), float(off[-1, spoken])
        done = _done_text(cosine, dex, float(latest["gradient_evenness"][spoken]), many=bool(_many(layout)[spoken]))
        hooks = int(latest["other_hooks"][which].sum())
        if hooks:
            there = "There is 1 hook" if hooks == 1 else f"There are {hooks} hooks"
            cause = f"{there} on {name_text(names, 'parameter')} that GradWatch did not set."
            remedy = f"without the register_hook or register_post_accumulate_grad_hook on {name_text(layers)}."
        else:
            cause = (
                "No hook on it is known; the backward pass of a torch.autograd.Function, or code that writes p.grad, "
                "can do so."
            )
            remedy = f"a look at what writes the gradients of {name_text(layers)} before optimizer.step()."
        message = f"The gradient of {name} is not what flows back through layer {layer}: something {done}. {cause}"
        severity = Severity.ERROR if turned else Severity.WARNING
        value, threshold = (cosine, -self.cosine) if turned else (dex, float(np.copysign(self.dex, dex)))
        onset = self._onset(history, np.flatnonzero(which), backs[-PAST_SAMPLES:], turned=turned)
        headline = f"the gradient of {name}: something {done}"
        return Finding(self.name, severity, layer, layers, value, threshold, message, remedy, onset, headline)

    def _onset(self, history: History, which: Sites, backs: Sites, *, turned: bool) -> int:
        """The first of the latest samples at which each of the parameters `which` was off as it is now."""
        recent = {name: history.at(name, backs)[:, history.layout.parameters] for name in self.needs}
        cosines, dex = recent["gradient_cosine"], recent["gradient_dex"]
        if turned:
            found = cosines <= -self.cosine
        else:
            held = history.codes(1)[-1, history.layout.parameters] == MEASURED
            off = dex - self._common(cosines, dex, recent["other_hooks"], held)
            # where too few agree on a factor, a size that has not changed is off as it is now
            same = np.abs(dex - dex[-1]) <= CONSTANT_FACTOR_DEX
            found = (off * np.sign(off[-1]) >= self.dex) | same
        return int(onset_of(found[:, which], backs).max())


def _done_text(cosine: float, dex: float, evenness: float, *, many: bool) -> str:
    turned = ["turned its sign"] if cosine < 0 else []
    made = [f"made it {ratio_text(dex)} times as large"] if np.isfinite(dex) and abs(dex) > SAME_SIZE_DEX else []
    if many and evenness >= EVENNESS and abs(cosine) < SAME_DIRECTION_COSINE:
        return ", and ".join([" and ".join([*turned, "kept nothing but its signs"]), *made])
    return " and ".join(turned + made)


def _steady(off: Floats) -> Mask:
    return np.asarray(np.ptp(off, axis=0) <= CONSTANT_FACTOR_DEX)


@lru_cache(maxsize=8)
def _weights(layout: Layout) -> Mask:
    """Which parameters are weights that are multiplied with, shape [parameters]."""
    names = layout.names(layout.parameters)
    return np.array([name.rpartition(".")[2] == "weight" for name in names], dtype=bool)


def _many(layout: Layout) -> Mask:
    """Which parameters have a direction worth the name, shape [parameters]."""
    return np.asarray(layout.sizes[layout.parameters] >= FEWEST_ELEMENTS)
