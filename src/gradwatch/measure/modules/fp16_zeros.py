"""The share of values of float16 backward signals that are exactly zero: small ones are rounded to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.dtensor import local_tensor
from gradwatch.measure.modules import MAX_TENSORS, GradOutputCallback, ModuleStatistic
from gradwatch.measure.reductions import gathered


@dataclass(slots=True, eq=False)
class _StepCounts:
    """What the hooks of one sampled step have measured. They hold it and nothing else."""

    found: list[tuple[Tensor, int, int]] = field(default_factory=list)
    """Count, site and elements of each signal, in one: autograd has a thread for each device."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp16ZerosReading:
    """The counts of one step, on the device."""

    layout: Layout
    tensors: Mapping[str, Tensor]
    sites: list[int]
    sizes: list[int]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """`half_zeros`, one number per site over all its calls, NaN for layers without a float16 signal."""
        n = len(self.layout)
        sizes = np.bincount(self.sites, weights=self.sizes, minlength=n)
        nonzero = np.bincount(self.sites, weights=numbers["half_nonzero"], minlength=n)
        sizes[0], nonzero[0] = sizes.sum(), nonzero.sum()
        with np.errstate(invalid="ignore"):
            return {"half_zeros": 1.0 - nonzero / sizes}


class Fp16Zeros(ModuleStatistic):
    """Counts the non-zero values of every float16 signal as it arrives, and keeps no signal.

    A signal's type hardly ever changes: samples 0, 1, 2, 4, 8, ... measure all layers, others only those whose signals
    were float16 before.
    """

    def __init__(self) -> None:
        self._step = _StepCounts()
        self._fp16_sites: set[int] = set()
        self._samples = 0

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        measured = not kind and (self._samples & (self._samples - 1) == 0 or site in self._fp16_sites)
        return _zero_count_callback(self._step, site) if measured else None

    def collect(self, layout: Layout) -> Fp16ZerosReading | None:
        step = self._step
        self._step = _StepCounts()
        self._samples += 1
        found = [*step.found]
        if not found:
            return None
        counts, sites, sizes = zip(*found, strict=True)
        self._fp16_sites.update(sites)
        return Fp16ZerosReading(layout, {"half_nonzero": gathered(counts)}, [*sites], [*sizes])


def _zero_count_callback(step: _StepCounts, site: int) -> GradOutputCallback:
    def on_grad_output(gradient: Tensor) -> None:
        if gradient.dtype is not torch.float16 or len(step.found) >= MAX_TENSORS:
            return
        values = local_tensor(gradient.detach())
        if values.layout is torch.strided and values.numel():
            step.found.append((torch.count_nonzero(values), site, values.numel()))

    return on_grad_output
