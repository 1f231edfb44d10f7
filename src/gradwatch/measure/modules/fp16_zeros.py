"""How many values of float16 backward signals have been rounded to zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.dtensor import local_tensor
from gradwatch.measure.modules import LIMIT, GradOutputCallback, ModuleStatistic


@dataclass(slots=True, eq=False)
class _StepCounts:
    """What the hooks of one sampled step have measured. They hold it and nothing else."""

    counts: list[Tensor] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Fp16ZerosReading:
    """The counts of one step, on their way to the host."""

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


class Fp16Zeros(ModuleStatistic):
    """Counts what is not zero in every float16 signal as it arrives, and keeps no signal.

    A signal's type hardly ever changes: at samples 0, 1, 2, 4, 8, ... all are looked at, at others those that were
    float16 before.
    """

    def __init__(self) -> None:
        self._step = _StepCounts()
        self._half: set[int] = set()
        self._samples = 0

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        looked_at = not kind and (self._samples & (self._samples - 1) == 0 or site in self._half)
        return _callback(self._step, site) if looked_at else None

    def collect(self, layout: Layout) -> Fp16ZerosReading | None:
        step = self._step
        self._step = _StepCounts()
        self._samples += 1
        self._half.update(step.sites)
        if not step.counts:
            return None
        device = step.counts[0].device
        counts = torch.stack([count.to(device, non_blocking=True) for count in step.counts])
        return Fp16ZerosReading(layout, {"half_nonzero": counts}, [*step.sites], [*step.sizes])


def _callback(step: _StepCounts, site: int) -> GradOutputCallback:
    def on_grad_output(gradient: Tensor) -> None:
        if gradient.dtype is not torch.float16 or len(step.counts) >= LIMIT:
            return
        values = local_tensor(gradient.detach())
        if values.layout is torch.strided and values.numel():
            step.counts.append(torch.count_nonzero(values))
            step.sites.append(site)
            step.sizes.append(values.numel())

    return on_grad_output
