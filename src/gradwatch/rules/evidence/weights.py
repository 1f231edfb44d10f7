"""Norms and updates of the weights: starts from zero, relative updates, how the loss depends on each layer."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import Floats, Layout, Mask, Sites
from gradwatch.rules.evidence.records import is_own
from gradwatch.rules.evidence.samples import RECENT_RECORDS, own_sample_backs, sample_backs

NEAR_ZERO_SHARE = 1e-3
"""Share of the usual norm of a layer's weights, the fourth root of their number, below which they start near zero.
An n x n matrix of the usual 1 / sqrt(n) entries has the norm sqrt(n); less small weights do not hide a signal by the
3.5 dex of `Vanishing`. Judgement."""

GROWTH_RATIO = 1.05
"""Ratio of the greatest of the later samples to the greatest of the earlier from which weights still grow. Judgement:
steady growth from zero has 2, a random walk 1.4."""

WEIGHT_FLOOR_SHARE = 0.1
"""Share of the usual norm of a layer's weights, the fourth root of their number, in units of which an update is
measured where the weights are smaller: what starts at zero may grow many times over. Prototype, where it is 0.1 /
sqrt(fan_in) an element; an n x n matrix has just that norm."""

OUTSIDE_WRITE_RATIO = 2.0
"""Ratio of a change of the weights to the most that the optimizer's steps can have made (logarithms) above which
something else wrote them, and the least factor by which they change then. Judgement."""

GROWTH_SAMPLES = 10
"""Samples needed to see that weights do not grow: a random walk may turn back at first. Judgement."""


def outside_writes(history: History, layers: Sites, backs: Sites, *, grew: bool) -> Mask:
    """Between which of the samples `backs` the weights of `layers` grew (`grew`) or shrank by far more than the updates
    of the steps between account for, so that something else wrote them: shape [samples - 1, layers].

    A step of `moved` of their size leaves 1 + moved of it at most, and 1 - moved at least.
    """
    steps = np.diff(np.cumsum(is_own(history, RECENT_RECORDS))[-backs])[:, None]
    norms, moved = (history.at(name, backs)[:, layers] for name in ("weight_norm", "update_ratio"))
    most = np.fmax(moved[:-1], moved[1:])
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.log(norms[1:] / norms[:-1] if grew else norms[:-1] / norms[1:])
        made = steps * (np.log1p(most) if grew else -np.log1p(-np.minimum(most, 1.0)))
        return np.asarray(change > np.maximum(OUTSIDE_WRITE_RATIO * made, np.log(OUTSIDE_WRITE_RATIO)))


def has_float16(layout: Layout) -> bool:
    """Whether weights are in float16."""
    return any(layout.sites[i].dtype == "float16" for i in layout.parameters)


def grows_from_zero(history: History, layers: Sites) -> Mask:
    """Which of `layers` (site indices) have weights that began at nearly zero and still grow, shape [layers].

    What lies before such a layer (LoRA, a zero-initialised head or residual branch) gets its signal as they grow. A
    layer that holds a bias and nothing else passes its signal on whatever it holds.
    """
    known = own_sample_backs(history, "weight_norm")
    if not len(known):
        return np.zeros(len(layers), dtype=bool)
    some = known[np.linspace(0, len(known) - 1, GROWTH_SAMPLES).astype(np.intp)]
    samples = history.at("weight_norm", some)[:, layers]
    usual = usual_weight_norms(history.layout)[layers]
    earlier, later = np.fmax.reduce(samples[: GROWTH_SAMPLES // 2]), np.fmax.reduce(samples[GROWTH_SAMPLES // 2 :])
    growing = (later >= GROWTH_RATIO * earlier) | (len(known) < GROWTH_SAMPLES)
    return np.asarray((samples[0] <= NEAR_ZERO_SHARE * usual) & growing & ~_holds_biases_alone(history.layout)[layers])


@lru_cache(maxsize=8)
def _holds_biases_alone(layout: Layout) -> Mask:
    """Which sites are layers whose parameters are all called bias."""
    weights = [not layout.sites[site].name.endswith(".bias") for site in layout.parameters]
    found = np.zeros(len(layout), dtype=bool)
    found[layout.owners] = True
    found[layout.owners[weights]] = False
    return found


def sensitivity(history: History, layers: Sites) -> Floats | None:
    """|gradient| |weight| of each of `layers` at the latest record: how the loss changes with a relative change of it.

    Scaling the weights of a layer that a norm follows scales its signal, and leaves this as it is. None where the
    model has no norm, or the numbers are not known.
    """
    known = own_sample_backs(history, "weight_norm")
    if not len(known) or not has_norm_layers(history.layout):
        return None
    found = history.row("grad_norm")[layers] * history.at("weight_norm", known[-1:])[0, layers]
    return None if np.isnan(found).any() else found


@lru_cache(maxsize=8)
def has_norm_layers(layout: Layout) -> bool:
    """Whether the model normalizes outputs, or the weights of a layer."""
    return any("Norm" in name for name in layout.modules)


def norms_text(layout: Layout) -> str:
    """What stands beside a signal that fades or grows in a model for which `has_norm_layers` holds."""
    of_outputs = any("Norm" in name for name in layout.modules - {"_SpectralNorm", "_WeightNorm"})
    return "in spite of the norms" if of_outputs else "with weights that are normalized"


@lru_cache(maxsize=8)
def usual_weight_norms(layout: Layout) -> Floats:
    """The norm that the weights of each layer usually have, shape [sites]: sqrt(n) for an n x n matrix."""
    return np.asarray(layout.sizes**0.25)


def update_samples(history: History) -> Sites:
    """The positions, from the end, of those of the last `RECENT_RECORDS` that have an update ratio, oldest first,
    without those of other optimizers than that of the newest of them.
    """
    backs, optimizers = sample_backs(history, "update_ratio"), history.optimizers(RECENT_RECORDS)
    return backs[optimizers[-backs] == optimizers[-backs[-1]]] if len(backs) else backs


def relative_updates(history: History, backs: Sites) -> Floats:
    """|new - old| / max(|old|, floor) of the layers, at the records `backs`: shape [records, layers]; NaN where not
    known.
    """
    layers = history.layout.layers
    floor = WEIGHT_FLOOR_SHARE * usual_weight_norms(history.layout)[layers]
    found, norms = history.at("update_ratio", backs)[:, layers], history.at("weight_norm", backs)[:, layers]
    return np.where(norms < floor, found * norms / floor, found)


def zeroed_by_interventions(history: History, n: int, sites: Sites) -> Mask:
    """Where interventions have made zeros of the gradient of `sites`, on purpose, in the last `n` records or as many as
    there are: shape [records, sites].
    """
    if not history.has("clip_factor"):
        return np.zeros((min(n, len(history)), len(sites)), dtype=bool)
    factors, used = history.window("clip_factor", n), history.window("grad_norm_clipped", n)
    return np.asarray((factors[:, sites] == 0) & ~(used[:, sites] > 0))  # a dry run would have
