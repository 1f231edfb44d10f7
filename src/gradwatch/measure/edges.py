"""Norms at the edges of float32 (0, infinite, tiny), had again in float64 where the host can see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.measure.device_buffer import on_host
from gradwatch.measure.reductions import SAFE_SQUARE, exact_norm


class FloatLimits:
    """Below which norm the float32 squares of each of a list of tensors may have underflowed."""

    def __init__(self, sizes: list[int]) -> None:
        """`sizes`: elements of each tensor."""
        self._safe: NDArray[np.float64] = np.sqrt([SAFE_SQUARE * size for size in sizes])
        self._surely = float(self._safe.max(initial=0.0))

    def mend(self, norms: NDArray[np.floating[Any]] | None, tensor: Callable[[int], Tensor | None]) -> float:
        """Look through `norms`, one for each tensor, and take those again of which float32 may not tell the truth.

        None, where the host cannot see them. `tensor`: the one at an index. Returns the sum of what float32 told, 0.0
        where there is none: what a glance tells of a step.
        """
        if norms is None or not len(norms):
            return 0.0
        listed: list[float] = norms.tolist()  # min and max of a short list, faster than numpy's of a short array
        if min(listed) >= self._surely and max(listed) < np.inf:
            return sum(listed)
        for slot in np.flatnonzero((norms < self._safe) | (norms == np.inf)):
            if (one := tensor(int(slot))) is not None:
                with np.errstate(over="ignore"):  # beyond float32 it stays infinite
                    norms[slot] = on_host(exact_norm(one.detach()))
        return sum(listed)
