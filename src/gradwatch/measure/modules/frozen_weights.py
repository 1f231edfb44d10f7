"""Root mean squares of the weights of frozen layers, once each: they tell whether anybody has trained them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.modules import ModuleReading, ModuleStatistic, OutputCallback
from gradwatch.measure.reductions import gathered, is_dense_real, wide_norm

MAX_ELEMENTS = 2**24
"""Elements of a parameter that are read at most: larger ones are no new heads. Judgement."""


class FrozenWeights(ModuleStatistic):
    """Reads the weights of each frozen layer when it first runs on a sampled step."""

    def __init__(self) -> None:
        self._parameters: list[tuple[int, str, int]] = []
        """Site of the layer, name of the parameter in it, and number of its elements."""
        self._norms: list[Tensor] = []
        self._known: set[int] = set()

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if kind or site in self._known:
            return None
        parameters = [each for each in module._parameters.values() if each is not None]
        if any(each.requires_grad for each in parameters):
            return None
        own = [each for each in parameters if is_dense_real(each.data)]
        if not own or any(each.numel() > MAX_ELEMENTS for each in own):
            return None
        there = weakref.ref(module)

        def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
            if site not in self._known and (module := there()) is not None:
                self._known.add(site)
                self.version += 1
                for name, parameter in module._parameters.items():
                    if parameter is not None and is_dense_real(parameter.data):
                        self._norms.append(wide_norm(parameter.detach()))
                        self._parameters.append((site, name, max(1, parameter.numel())))

        return on_output

    def collect(self, layout: Layout) -> ModuleReading | None:
        (norms, parameters), self._norms, self._parameters = (self._norms, self._parameters), [], []
        if not norms:
            return None
        return ModuleReading({"frozen_norms": gathered(norms)}, partial(_frozen_rms, layout, parameters))


def _frozen_rms(
    layout: Layout, parameters: Sequence[tuple[int, str, int]], numbers: Mapping[str, Floats]
) -> dict[str, Floats]:
    """One number for each parameter of a frozen layer."""
    found = np.full(len(layout), np.nan)
    found[0] = 0.0  # that it was measured
    for (site, name, size), norm in zip(parameters, numbers["frozen_norms"], strict=True):
        place = layout.index.get(f"{layout.sites[site].name}.{name}")
        if place is not None:
            found[place] = norm / size**0.5
    return {"frozen_rms": found}
