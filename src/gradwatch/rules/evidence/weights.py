"""What the weights say about a weak or strong signal: a start from zero, or a norm that makes its scale arbitrary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.history import History
from gradwatch.core.record import Floats, Layout
from gradwatch.rules.evidence.profile import RECENT, sampled

TINY = 1e-3
"""Share of the usual norm of a layer's weights, the fourth root of their number, under which they start near zero.
An n x n matrix of the usual 1 / sqrt(n) entries has the norm sqrt(n); less small weights do not hide a signal by the
3.5 dex of `Vanishing`. Judgement."""

GROWING = 1.05
"""Ratio of the most of the later samples to the most of the earlier at which weights still grow. Judgement: steady
growth from zero has 2, a random walk 1.4."""

ENOUGH = 10
"""Samples needed to see that weights do not grow: a walk may turn back at first. Judgement."""


def start_from_zero(history: History, layers: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which of `layers` (site indices) have weights that began at nearly zero and still grow, shape [layers].

    What lies before such a layer (LoRA, a zero-initialised head or residual branch) gets its signal as they grow.
    """
    weights, known = _known_weights(history)
    if weights is None or not len(known):
        return np.zeros(len(layers), dtype=bool)
    samples = weights[known[np.linspace(0, len(known) - 1, ENOUGH).astype(np.intp)]][:, layers]
    usual = np.array([history.layout.sites[i].numel for i in layers]) ** 0.25
    earlier, later = np.fmax.reduce(samples[: ENOUGH // 2]), np.fmax.reduce(samples[ENOUGH // 2 :])
    growing = (later >= GROWING * earlier) | (len(known) < ENOUGH)
    return np.asarray((samples[0] <= TINY * usual) & growing)


def sensitivity(history: History, layers: NDArray[np.intp]) -> Floats | None:
    """|gradient| |weight| of each of `layers` at the latest record: how the loss answers to a relative change of it.

    Scaling the weights of a layer that a norm follows scales its signal, and leaves this as it is. None where the
    model has no norm, or the numbers are not known.
    """
    gradients, (weights, known) = history.window("grad_norm", 1), _known_weights(history)
    if gradients is None or weights is None or not len(known) or not normalised(history.layout):
        return None
    found = gradients[0, layers] * weights[known[-1], layers]
    return None if np.isnan(found).any() else found


def _known_weights(history: History) -> tuple[Floats | None, NDArray[np.intp]]:
    """Norms of the weights, and the records of this optimizer at which they were sampled, oldest first."""
    optimizers = history.optimizers(RECENT)
    places = sampled(history, "weight_norm", RECENT, among=np.zeros(1, dtype=np.intp))
    return history.window("weight_norm", RECENT), places[optimizers[places] == optimizers[-1]]


def normalised(layout: Layout) -> bool:
    """Whether the model has a normalisation layer."""
    return any("Norm" in name for name in layout.modules)
