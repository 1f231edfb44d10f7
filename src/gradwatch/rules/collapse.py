"""Collapse: weights, or codes inside the model, that shrink away by a penalty that outweighs the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text
from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import MEASURED, Floats, Layout, Mask, Sites
from gradwatch.rules.evidence.baseline import LEVEL_RECORDS
from gradwatch.rules.evidence.jumps import beginning
from gradwatch.rules.evidence.recent_rows import ROUNDING, RecentRows
from gradwatch.rules.evidence.records import is_alone, is_own, own_losses, own_records
from gradwatch.rules.evidence.samples import RECENT_RECORDS, in_a_row, lasted, onset_of, own_sample_backs, own_samples
from gradwatch.rules.evidence.weights import WEIGHT_FLOOR_SHARE, outside_writes, usual_weight_norms
from gradwatch.rules.evidence.wording import distance_text
from gradwatch.rules.rule import CheckedRule

PEAK_SAMPLES = 32
"""Samples among which the highest norm is searched. Judgement: norms of weights change slowly."""

FEW_LAYERS = 3
"""In a model of fewer layers all have to shrink. The last layer, or the only one, shrinks to its solution where that is
small. Layers behind each other do not do so together: a loss takes as much from one as from the next (Du, Hu, Lee 2018,
theorem 2.1), while decay and penalties take the same share of all."""

IMPROVED_RATIO = 0.9
"""The loss is clearly better below this share of its level at the peak of the weights. Judgement."""

SHORTEST_DECAY = 4
"""Steps over which a decay stands out from the noise of single steps; the first samples span as many. Judgement."""

RETURN_RATIO = 3.0
"""Ratio of weights to those at the sample before, from which on they come back from a jump, and do not decay. As
`Divergence.growth`."""

SLOWEST_SHARE = 0.5
"""Share of the limit's rate at which weights have to fall for a decay to have begun. Judgement: they may have drifted
before."""

LONG_HALF_LIFE = 10_000
"""Steps in which the weight decay that the remedy names halves the weights. Judgement: AdamW's default,
0.01 at a rate of 1e-3, takes 69,000."""

DECAY_SHARE = 0.3
"""Share of what the weights lose that learning rate times weight decay has to be to be the reason. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse(CheckedRule):
    """Half of the layers lost nearly all of their weights' size, or lose it so fast that no gradient can make up. Or
    all that goes into a layer and has a term of its own in the loss, as means and variances of a posterior have, is
    near 0.
    """

    name: ClassVar[str] = "collapse"
    needs: ClassVar[frozenset[str]] = frozenset({"weight_norm", "output_rms"})

    left: float = 0.1
    """Share of their highest norm below which weights are gone. Prototype."""
    half_life: float = 20.0
    """Steps in which weights must not be halved. Prototype."""
    code_rms: float = 0.1
    """Root mean square below which the outputs of a posterior carry no information: the divergence is half its square
    for a mean, in nats, and a quarter of it for a log-variance. Judgement."""
    code_shrunk_share: float = 0.5
    """Limit for these outputs relative to the first sample. Judgement: layers that start at zero grow."""
    code_samples: int = 5
    """Samples in a row. Judgement."""
    code_records: int = 50
    """Records that these samples span. Judgement: a divergence may be large at first and small for a while."""
    layers_share: float = 0.5
    """Share of the layers, not counting norms. Prototype."""

    def suspects(self, rows: RecentRows) -> Mask:
        """Samples of weights that have shrunk enough for a decay, or of such small outputs."""
        share = max(self.left, 0.5 ** (SHORTEST_DECAY / self.half_life)) / ROUNDING
        limits = share * rows.range_over_samples("weight_norm")[1]
        suspected = (rows.values("weight_norm")[:, rows.layout.layers] <= limits).any(axis=1)
        for _, group in _codes_of(rows.layout):
            suspected |= rows.values("output_rms")[:, group].max(axis=1) <= self.code_rms
        return np.asarray(suspected)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        weights, codes = self._weights(history), self._codes(history)
        return None if weights is None and codes is None else [*(weights or ()), *(codes or ())]

    def _weights(self, history: History) -> Sequence[Finding] | None:
        """The weights shrink, or have shrunk."""
        if history.newest("weight_norm") != 1:
            return None
        layers = _weighed(history)
        if not len(layers):
            return []
        backs = own_sample_backs(history, "weight_norm")
        if not self._shrink(history, layers, backs):
            return []
        return self._shrink(history, layers, _unwritten(history, layers, backs))

    def _shrink(self, history: History, layers: Sites, backs: Sites) -> Sequence[Finding]:
        """The findings for `layers` at the samples `backs`, the latest record among them."""
        return self._shrunk(history, layers, backs) or self._decays(history, layers, backs)

    def _shrunk(self, history: History, layers: Sites, backs: Sites) -> Sequence[Finding]:
        """Whether weights are nearly gone, as against the largest that they were."""
        some = backs[np.linspace(0, len(backs) - 1, min(PEAK_SAMPLES, len(backs))).astype(np.intp)]
        earlier = np.nan_to_num(history.at("weight_norm", some)[:, layers], posinf=0.0)  # an overflow is no peak
        peak, now = earlier.max(axis=0), history.at("weight_norm", backs[-1:])[0, layers]
        gone = now < self.left * peak
        since = int(some[earlier.sum(axis=1).argmax()])
        if np.count_nonzero(gone) < self._wanted(history, len(layers), since):
            return []
        names = history.layout.names(layers[gone])
        share = float(np.median(now[gone] / peak[gone]))
        sizes = np.nan_to_num(history.at("weight_norm", backs)[:, layers[gone]] / peak[gone], posinf=0.0)
        onset = int(backs[::-1][sizes.sum(axis=1)[::-1].argmax()])
        message = (
            f"The weights of {name_text(names)} have shrunk to {number_text(100 * share)} % of their highest "
            f"norm, in {len(names)} of {len(layers)} layers. Together they were largest "
            f"{distance_text(history, onset)} ago."
        )
        headline = f"the weights shrank to {number_text(100 * share)} % of their highest norm"
        more, remedy = _why(history, names, onset, lower=max(1, onset - 1))
        text, limit = message + more, self.left
        return [Finding(self.name, Severity.WARNING, names[0], names, share, limit, text, remedy, onset, headline)]

    def _decays(self, history: History, layers: Sites, backs: Sites) -> Sequence[Finding]:
        """Whether weights fell at every sample since one `SHORTEST_DECAY` steps or more ago, and too fast."""
        own = np.cumsum(is_own(history, RECENT_RECORDS), dtype=np.intp)[-backs]
        far = np.flatnonzero(own[-1] - own >= SHORTEST_DECAY)
        if not len(far):
            return []
        steps, since = int(own[-1] - own[far[-1]]), history.at("weight_norm", backs[far[-1] :])[:, layers]
        with np.errstate(divide="ignore", invalid="ignore"):
            left, changes = since[-1] / since[0], np.diff(since, axis=0)
        falls = (changes < 0).all(axis=0) & (left <= 0.5 ** (steps / self.half_life))
        floor = WEIGHT_FLOOR_SHARE * usual_weight_norms(history.layout)[layers]
        before = np.maximum(history.at("weight_norm", backs[: far[-1] + 1])[:, layers], floor)
        falls &= ~(before[1:] > RETURN_RATIO * before[:-1]).any(axis=0)
        if np.count_nonzero(falls) < self._wanted(history, len(layers), int(backs[far[-1]])):
            return []
        names = history.layout.names(layers[falls])
        half_life = float(np.median(-steps / np.log2(np.maximum(left[falls], 1e-12))))
        measured = "measured " * history.has_gaps(int(backs[far[-1]]))
        message = (
            f"The weights of {name_text(names)} lose half of their norm in {number_text(half_life)} {measured}steps, "
            f"in {len(names)} of {len(layers)} layers; the limit is {self.half_life:.0f} {measured}steps."
        )
        headline = f"the weights lose half of their norm in {number_text(half_life)} {measured}steps"
        norms = history.at("weight_norm", backs)[:, layers[falls]]
        onset = self._falls_since(norms, backs, own, known=int(far[-1]))
        more, remedy = _why(history, names, onset, lower=onset)
        text, limit = message + more, self.half_life
        return [Finding(self.name, Severity.WARNING, names[0], names, half_life, limit, text, remedy, onset, headline)]

    def _falls_since(self, norms: Floats, backs: Sites, own: Sites, *, known: int) -> int:
        """The first sample with fallen weights, of those since which they fall at half the limit's rate at least; the
        sample after `known`, since which they fall in all, or an earlier one.
        `norms`: shape [samples, layers]; `own`: steps up to each sample.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            halvings = np.median(np.log2(norms[:-1] / norms[1:]), axis=1)
        fast = ~(halvings < SLOWEST_SHARE * np.diff(own) / self.half_life)
        fast[known:] = True
        return int(backs[len(backs) - in_a_row(fast)])

    def _wanted(self, history: History, layers: int, since: int) -> float:
        """Of how many `layers` it must be so, as they have shrunk since the record `since`.

        Where they are few, or the loss has become better by it, all of them and more than one.
        """
        return max(2, layers) if layers < FEW_LAYERS or _learnt(history, since) else self.layers_share * layers

    def _codes(self, history: History) -> Sequence[Finding] | None:
        """All outputs that flow both into the loss and into one more layer are near zero."""
        layout = history.layout
        groups = _codes_of(layout)
        found = own_samples(history, "output_rms") if groups else None
        if found is None:
            return None
        levels, backs = found
        for after, group in groups:
            outputs = levels[:, group].max(axis=1)
            small: Mask = outputs <= self.code_rms
            shrunk = outputs[-1] <= self.code_shrunk_share * outputs[0]
            if not shrunk or not lasted(small, backs, samples=self.code_samples, records=self.code_records):
                continue
            names, rms = layout.names(group), float(outputs[-1])
            message = (
                f"The outputs of {name_text(names)}, which have a term of their own in the loss and are what layer "
                f"{layout.sites[after].name} gets, have shrunk to a root mean square of {number_text(rms)}. If they "
                "are the mean and the logarithm of the variance of a posterior, it has collapsed onto its prior, and "
                "says next to nothing about the input. If what follows normalizes them, their size does not matter."
            )
            remedy = (
                "for a posterior, a smaller weight for that term (the divergence), raised from 0 over the first "
                "epochs; and the reconstruction summed over elements as the divergence is, not averaged."
            )
            headline = (
                f"outputs with a term of their own in the loss have shrunk to {number_text(rms)}: a posterior "
                "collapses so"
            )
            onset = int(onset_of(small, backs))
            where, limit = (names[0], names), self.code_rms
            return [Finding(self.name, Severity.WARNING, *where, rms, limit, message, remedy, onset, headline)]
        return []


def _weighed(history: History) -> Sites:
    """Layers that train and have weights proper: those of a norm are excepted from decay as a rule."""
    layout = history.layout
    known = (history.codes(1)[0] == MEASURED) & np.isfinite(history.row("weight_norm"))
    layers = layout.layers[known[layout.layers]]
    return layout.without_class(layers, "Norm")


def _unwritten(history: History, layers: Sites, backs: Sites) -> Sites:
    """Those of the samples `backs` since something other than the optimizer last wrote any of `layers`: clipped or
    pruned them, say.
    """
    written = np.flatnonzero(outside_writes(history, layers, backs, grew=False).any(axis=1))
    return backs[written[-1] + 1 :] if len(written) else backs


def _learnt(history: History, since: int) -> bool:
    """Whether the loss is clearly better than at the record `since`."""
    own = own_losses(history, since)
    some = min(LEVEL_RECORDS, len(own) // 2)
    if not some:
        return False
    before, now = float(np.median(own[:some])), float(np.median(own[-some:]))
    return now < before - (1 - IMPROVED_RATIO) * abs(before)


def _why(history: History, names: tuple[str, ...], onset: int, *, lower: int) -> tuple[str, str]:
    """What is known of why the weights of `names` have shrunk since the record `onset`, as sentences, and what
    to change. `lower`: the position of the first record with smaller weights.
    """
    how = beginning(history, lower)
    lost, rate = _lost_each_step(history, names, onset)
    known = how.sentence
    if lost > 0:
        known += (
            f" A step took {number_text(100 * lost)} % of them on average; at lr={number_text(rate)} a weight_decay of "
            f"{number_text(lost / rate)} in SGD or AdamW takes as much."
        )
    return known, how.remedy or _decay_remedy(history, lost, rate)


def _lost_each_step(history: History, names: tuple[str, ...], onset: int) -> tuple[float, float]:
    """The share of the weights of `names` that a step takes, in the median, since the record `onset`; and the learning
    rate. 0 where that changed, or they are not known.
    """
    own = own_records(history)
    own = own[own <= onset]
    rates, weights = history.scalar("lr", onset), history.window("weight_norm", onset)
    rates = rates[-own]
    sites = [history.layout.index[name] for name in names]
    with np.errstate(divide="ignore", invalid="ignore"):
        left = float(np.median(weights[-1, sites] / weights[-own[0], sites]))
    if not (rates > 0).all() or np.ptp(rates) > 0 or not 0 < left < 1:
        return 0.0, 0.0
    steps = len(own) - 1
    if history.has_gaps(int(own[0])):
        if not is_alone(history):  # how many of the steps between were this optimizer's is not known
            return 0.0, 0.0
        steps = history.steps[-1] - history.steps[-own[0]]
    return 1 - left ** (1 / steps), float(rates[-1])


def _decay_remedy(history: History, lost: float, rate: float) -> str:
    """The remedy where each step takes the share `lost` of the weights at the learning `rate`; 0 where not known."""
    decay = history.number("weight_decay")
    if history.number("decay_in_gradient") == 1:
        return (
            f"torch.optim.AdamW in configure_optimizers: this optimizer adds weight_decay={number_text(decay, 3)} to "
            "the gradient and divides by its size, which moves a weight with no other gradient by about lr in each "
            "step. If the loss has a penalty on the weights, a smaller factor of it."
        )
    if not lost > 0:
        return "a smaller weight_decay in configure_optimizers, or a smaller factor of a penalty on the weights."
    less = np.log(2) / LONG_HALF_LIFE / lost
    then = f"at the rate measured, {LONG_HALF_LIFE:,} steps would halve the weights then."
    if decay * rate >= DECAY_SHARE * lost:
        return f"weight_decay={number_text(decay * less, 1)} in configure_optimizers: {then}"
    return f"{number_text(less, 1)} times the penalty on the weights, or what else shrinks them: {then}"


@lru_cache(maxsize=8)
def _codes_of(layout: Layout) -> tuple[tuple[int, Sites], ...]:
    """Layers that flow into the loss and into one more layer: that layer, and all that flow into it, if all do."""
    into: dict[int, list[int]] = {}
    for before, after in layout.edges or ():
        into.setdefault(after, []).append(before)
    to_loss = set(into.pop(0, ()))
    found = ((layer, layers) for layer, layers in into.items() if to_loss.issuperset(layers))
    return tuple((layer, np.array(layers, dtype=np.intp)) for layer, layers in found)
