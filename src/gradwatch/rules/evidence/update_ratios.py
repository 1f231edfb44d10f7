"""Updates: by what share of their own size the sampled steps moved each layer's weights."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.history import History
from gradwatch.core.record import Floats, Layout
from gradwatch.rules.evidence.profile import RECENT, sampled

FLOOR = 0.1
"""Share of the usual norm of a layer's weights, the fourth root of their number, that an update is measured by where
the weights are smaller: what starts at zero may grow many times over. `detection.md`, where it is 0.1 / sqrt(fan_in)
an element; an n x n matrix has just that norm."""


@lru_cache(maxsize=8)
def usual_norms(layout: Layout) -> Floats:
    """The norm that the weights of each layer usually have, shape [layers]: sqrt(n) for an n x n matrix."""
    return np.array([layout.sites[i].numel for i in layout.layers], dtype=np.float64) ** 0.25


def fresh(history: History) -> bool:
    """Whether the step before the latest record was sampled: an update is known once its step is over."""
    return len(history) > 1 and history.age("update_ratio") == 1


def samples(history: History) -> NDArray[np.intp]:
    """Which of the last `RECENT` records know the update, of the optimizer that the newest of them is of."""
    places = sampled(history, "update_ratio", RECENT, among=np.zeros(1, dtype=np.intp))
    optimizers = history.optimizers(RECENT)[places]
    return places[optimizers == optimizers[-1]] if len(places) else places


def moves(history: History, places: NDArray[np.intp]) -> Floats:
    """|new - old| / max(|old|, floor) of the layers at `places`, shape [places, layers]; NaN where not known.

    `places`: among the last `RECENT` records.
    """
    layout, ratios = history.layout, history.window("update_ratio", RECENT)
    assert ratios is not None, "there are samples"
    found = ratios[np.ix_(places, layout.layers)]
    weights = history.window("weight_norm", RECENT)
    if weights is None:
        return found
    norms, floor = weights[np.ix_(places, layout.layers)], FLOOR * usual_norms(layout)
    return np.where(norms < floor, found * norms / floor, found)


def held(history: History, n: int, sites: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Where interventions have made zeros of the gradient of `sites`, on purpose, in the last `n` records or as many as
    there are: shape [records, sites].
    """
    factors, used = history.window("clip_factor", n), history.window("grad_norm_clipped", n)
    if factors is None or used is None:
        return np.zeros((min(n, len(history)), len(sites)), dtype=bool)
    return np.asarray((factors[:, sites] == 0) & ~(used[:, sites] > 0))  # a dry run would have
