"""Norms at the edges of float32 (0, infinite, tiny), had again in float64 where the host can see them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.slab import Slab, on_host
from gradwatch.stats import SAFE_SQUARE, exact_norm


class Edges:
    """Below which norm the float32 squares of each of a list of tensors may have underflowed."""

    def __init__(self, sizes: list[int]) -> None:
        """`sizes`: elements of each tensor."""
        self._safe: NDArray[np.float64] = np.sqrt([SAFE_SQUARE * size for size in sizes])
        self._surely = float(self._safe.max(initial=0.0))

    def mend(self, slab: Slab, row: str, tensor: Callable[[int], Tensor | None]) -> float:
        """Look through the first slots of `row`, and take those again of which float32 may not tell the truth.

        `tensor`: the one whose norm is in a slot, by the slot's index. Returns the sum of those float32 told, 0.0 where
        the host cannot see them: what a glance tells of a step.
        """
        view = slab.view(row)
        if view is None or not len(self._safe):
            return 0.0
        norms = view[: len(self._safe)]
        listed: list[float] = norms.tolist()  # min and max of a short list, faster than numpy's of a short array
        if min(listed) >= self._surely and max(listed) < np.inf:
            return sum(listed)
        for slot in np.flatnonzero((norms < self._safe) | (norms == np.inf)):
            if (one := tensor(int(slot))) is not None:
                norms[slot] = on_host(exact_norm(one.detach()))
        return sum(listed)
