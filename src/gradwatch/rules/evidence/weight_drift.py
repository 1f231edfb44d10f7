"""Weights that are carried away: they grow many times over in few steps, and nothing is learnt by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.history import OPENING, History
from gradwatch.core.record import Floats
from gradwatch.rules.evidence.profile import MEASURED, RECENT, sampled
from gradwatch.rules.evidence.update_ratios import FLOOR, usual_norms
from gradwatch.rules.evidence.weights import normalised

USUAL = 20
"""Losses whose median is a level. Judgement."""

LOST = 1.25
"""Times the least level of the loss, up to now, that it has again. Judgement."""

LEARNT = 0.5
"""Share of its first level under which a loss is learnt all the same. Judgement."""


@dataclass(frozen=True, slots=True)
class WeightDrift:
    """What was seen."""

    layers: NDArray[np.intp]
    """Site indices, in model order."""
    furthest: int
    """The one among them that grew most."""
    growth: float
    """Its norm over what it was."""
    steps: int
    lowest: float
    """The least level of the loss so far."""
    loss: float
    """Its level now."""


def wandered(history: History, *, growth: float, records: int, layers_share: float) -> WeightDrift | None:
    """Whether at the latest record, a sampled one, the weights of a share of the layers have `growth` times the norm
    that they had within the last `records`, with a loss that is worse than it was.

    None where that is not so or cannot be told: a norm makes the size of weights arbitrary.
    """
    layout = history.layout
    if history.age("weight_norm") != 0 or (found := grown(history, records)) is None:
        return None
    ratios, steps = found
    far = ratios >= growth
    if not far.any() or np.count_nonzero(far) < layers_share * np.count_nonzero(~np.isnan(ratios)):
        return None
    levels = _levels(history)
    if levels is None or not levels[2] > max(LOST * levels[1], LEARNT * levels[0]) > 0:
        return None
    furthest = int(np.nanargmax(ratios))
    return WeightDrift(
        layout.layers[far], int(layout.layers[furthest]), float(ratios[furthest]), steps, levels[1], levels[2]
    )


def grown(history: History, records: int) -> tuple[Floats, int] | None:
    """The norm of each layer's weights, shape [layers], over what it was at the first sample within the last `records`;
    and the records since that. NaN for layers that do not train, or began near zero.

    None where it is not known, or where a norm makes the size of weights arbitrary.
    """
    layout, rows = history.layout, history.window("weight_norm", RECENT)
    if rows is None or normalised(layout):
        return None
    optimizers = history.optimizers(RECENT)
    places = sampled(history, "weight_norm", RECENT, among=np.zeros(1, dtype=np.intp))
    places = places[(optimizers[places] == optimizers[-1]) & (places >= len(optimizers) - 1 - records)]
    if not len(places):
        return None
    first, last = rows[places[[0, -1]]][:, layout.layers]
    trained = (history.codes(1)[0, layout.layers] == MEASURED) & (first >= FLOOR * usual_norms(layout))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(trained, last / first, np.nan), len(optimizers) - 1 - int(places[0])


def _levels(history: History) -> tuple[float, float, float] | None:
    """The loss at first, at its least, and now: medians of `USUAL`. None where it is not known, or too short."""
    losses, optimizers = history.scalar("loss", len(history)), history.optimizers(len(history))
    if losses is None:
        return None
    own: Floats = losses[optimizers == optimizers[-1]]
    own = own[np.isfinite(own)]
    if len(own) < max(3 * USUAL, OPENING):
        return None
    levels = np.median(own[: len(own) // USUAL * USUAL].reshape(-1, USUAL), axis=1)
    return float(np.median(own[:USUAL])), float(levels.min()), float(np.median(own[-USUAL:]))
