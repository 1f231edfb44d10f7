"""The gauge of fp16: how many values of the signals that are float16 have been rounded to zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.dtensor import local_tensor
from gradwatch.measure.modules import LIMIT, Arrived


@dataclass(slots=True, eq=False)
class _Basket:
    """What the taps of one sampled step have gathered; they hold it and nothing else."""

    counts: list[Tensor] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Fp16ZerosReading:
    """The counts of one step, under way."""

    layout: Layout
    tensors: Mapping[str, Tensor]
    sites: list[int]
    sizes: list[int]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """`half_zeros`, one number per site, NaN for layers without a float16 signal. Several calls of a layer are
        one.
        """
        n = len(self.layout)
        sizes = np.bincount(self.sites, weights=self.sizes, minlength=n)
        there = np.bincount(self.sites, weights=numbers["half_nonzero"], minlength=n)
        sizes[0], there[0] = sizes.sum(), there.sum()
        with np.errstate(invalid="ignore"):
            return {"half_zeros": 1.0 - there / sizes}


class Fp16Zeros:
    """Counts what is not zero in every float16 signal as it arrives, and keeps no signal.

    A signal's type hardly ever changes: at samples 0, 1, 2, 4, 8, ... all are looked at, at others those that were
    float16 before.
    """

    def __init__(self) -> None:
        self._basket = _Basket()
        self._half: set[int] = set()
        self._samples = 0

    def on_output(self, site: int, module: nn.Module, kind: str) -> None:
        return None

    def on_signal(self, site: int, module: nn.Module, kind: str) -> Arrived | None:
        looked_at = not kind and (self._samples & (self._samples - 1) == 0 or site in self._half)
        return _tap(self._basket, site) if looked_at else None

    def on_loss(self, loss: Tensor) -> None: ...

    def collect(self, layout: Layout) -> Fp16ZerosReading | None:
        basket = self._basket
        self._basket = _Basket()
        self._samples += 1
        self._half.update(basket.sites)
        if not basket.counts:
            return None
        device = basket.counts[0].device
        counts = torch.stack([count.to(device, non_blocking=True) for count in basket.counts])
        return Fp16ZerosReading(layout, {"half_nonzero": counts}, basket.sites, basket.sizes)


def _tap(basket: _Basket, site: int) -> Arrived:
    def arrived(gradient: Tensor) -> None:
        if gradient.dtype is not torch.float16 or len(basket.counts) >= LIMIT:
            return
        values = local_tensor(gradient.detach())
        if values.layout is torch.strided and values.numel():
            basket.counts.append(torch.count_nonzero(values))
            basket.sites.append(site)
            basket.sizes.append(values.numel())

    return arrived
