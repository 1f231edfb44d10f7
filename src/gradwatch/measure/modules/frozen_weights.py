"""Root mean squares of the weights of frozen layers, once each: they tell whether anybody has trained them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.modules import ModuleStatistic, OutputCallback
from gradwatch.measure.reductions import gathered, is_dense_real, wide_type

MAX_ELEMENTS = 2**24
"""Elements of a parameter that are read at most: larger ones are no new heads. Judgement."""


@dataclass(slots=True, eq=False)
class _WeightNorms:
    """What the hooks of one sampled step have measured."""

    names: list[tuple[int, str]] = field(default_factory=list)
    """Site of the layer, and name of the parameter in it."""
    norms: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, site: int, layer: nn.Module) -> None:
        for name, parameter in layer._parameters.items():
            if parameter is not None and is_dense_real(parameter.data):
                self.names.append((site, name))
                self.norms.append(torch.linalg.vector_norm(parameter.detach(), dtype=wide_type(parameter)))
                self.sizes.append(max(1, parameter.numel()))


@dataclass(frozen=True, slots=True, eq=False)
class FrozenWeightsReading:
    """The norms of one step, on the device."""

    layout: Layout
    step: _WeightNorms
    tensors: Mapping[str, Tensor]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """`frozen_rms`: one number for each parameter of a frozen layer."""
        found, sites = np.full(len(self.layout), np.nan), self.layout.sites
        found[0] = 0.0  # that it was measured
        norms = zip(self.step.names, numbers["frozen_norms"], self.step.sizes, strict=True)
        for (site, name), norm, size in norms:
            place = self.layout.index.get(f"{sites[site].name}.{name}")
            if place is not None:
                found[place] = norm / size**0.5
        return {"frozen_rms": found}


class FrozenWeights(ModuleStatistic):
    """Reads the weights of each frozen layer when it first runs on a sampled step."""

    def __init__(self) -> None:
        self._step = _WeightNorms()
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
                self._step.add(site, module)

        return on_output

    def collect(self, layout: Layout) -> FrozenWeightsReading | None:
        step, self._step = self._step, _WeightNorms()
        return FrozenWeightsReading(layout, step, {"frozen_norms": gathered(step.norms)}) if step.norms else None
