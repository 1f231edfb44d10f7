"""How far a model's outputs are from their targets, which only the loss sees: told by the loss and its gradient."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.history import History
from gradwatch.core.record import Floats
from gradwatch.rules.evidence.profile import RECENT

SLACK = 0.02
"""Deviation from a loss's own identity that is let pass. Judgement: float32 keeps it to 0.001."""


def residuals(history: History, head: int, ago: NDArray[np.intp]) -> Floats | None:
    """Root mean square (or mean) of outputs - targets at the records `ago`, shape [len(ago)], if the loss is known to
    be one of those below, of the outputs of the layer `head` and of nothing else; NaN where it is not.

    With residuals r [n] and the signal s = |dL/d(output)| a loss tells what it is by a number that no scale enters:

    - mean of r^2:  s^2 n / (4 L) = 1, and 1/2 with the half before it;
    - sum of r^2:   s^2 / (4 L) = 1, and 1/2 likewise;
    - mean of |r|:  s^2 n = 1, as of Huber's loss where |r| is large.

    None where loss or signals were never known. A cross-entropy of ten classes may come near the first by chance, but
    its residuals do not come near any that matter.
    """
    loss, norms = history.scalar("loss", RECENT), history.window("signal_norm", RECENT)
    rms = history.window("signal_rms", RECENT)
    if loss is None or norms is None or rms is None:
        return None
    places = len(loss) - 1 - ago
    losses, s, each = loss[places], norms[places, head], rms[places, head]
    found = np.full(len(ago), np.nan)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        n = np.round((s / each) ** 2)
        squares = s**2 / (4 * losses)
        for kind, per in ((squares * n, 1.0), (squares, n)):
            for half in (1.0, 0.5):
                fits = (losses > 0) & (np.abs(kind / half - 1) < SLACK)
                found = np.where(fits, np.sqrt(losses / (half * per)), found)
        distances = (losses > 0) & (np.abs(s**2 * n - 1) < SLACK)
        return np.where(distances, losses, found)
