"""Root mean squares and largest magnitudes of frozen parameters, once each: they tell whether anybody has trained
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout, name_within
from gradwatch.measure.layers import is_lazy
from gradwatch.measure.modules import ModuleReading, ModuleStatistic, OutputCallback
from gradwatch.measure.reductions import is_dense_real, joined, wide_norm

MAX_ELEMENTS = 2**24
"""Elements of a parameter that are read at most: larger ones are no new heads. Judgement."""


class FrozenWeights(ModuleStatistic):
    """Reads each frozen parameter when its layer first runs on a sampled step."""

    def __init__(self) -> None:
        self._read: list[tuple[Tensor, Tensor, tuple[int, str, int]]] = []
        """Norm and largest magnitude, 0-d; site of the layer, name of the parameter in it, and number of its elements.
        """
        self._known: set[tuple[int, str]] = set()
        """Sites and names of those that were read."""

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if kind or not self._unread(site, module):
            return None
        there = weakref.ref(module)

        def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
            for name, weights in {} if (module := there()) is None else self._unread(site, module).items():
                self._known.add((site, name))
                self.version += 1
                largest = torch.linalg.vector_norm(weights, inf)
                self._read.append((wide_norm(weights), largest, (site, name, weights.numel())))

        return on_output

    def _unread(self, site: int, module: nn.Module) -> dict[str, Tensor]:
        """The frozen parameters of `module` to be read, by name; none of a layer with a large one."""
        frozen = {
            name: parameter.detach()
            for name, parameter in module._parameters.items()
            if not (parameter is None or parameter.requires_grad or is_lazy(parameter) or (site, name) in self._known)
        }
        own = {name: weights for name, weights in frozen.items() if weights.numel() and is_dense_real(weights)}
        return {} if any(weights.numel() > MAX_ELEMENTS for weights in own.values()) else own

    def collect(self, layout: Layout) -> ModuleReading | None:
        if not self._read:
            return None
        norms, largest, parameters = zip(*self._read, strict=True)
        self._read = []
        tensors = {"frozen_norms": joined(norms), "frozen_largest": joined(largest)}
        return ModuleReading(tensors, partial(_by_parameter, layout, parameters))


def _by_parameter(
    layout: Layout, parameters: Sequence[tuple[int, str, int]], numbers: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Two numbers for each frozen parameter."""
    rms, most = np.full((2, len(layout.sites)), np.nan)
    rms[0] = most[0] = 0.0  # that they were measured
    for (site, name, size), norm, largest in zip(
        parameters, numbers["frozen_norms"], numbers["frozen_largest"], strict=True
    ):
        place = layout.index.get(name_within(layout.sites[site].name, name))
        if place is not None:
            rms[place], most[place] = norm / size**0.5, largest
    return {"frozen_rms": rms, "frozen_max": most}
