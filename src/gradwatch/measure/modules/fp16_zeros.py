"""The share of values of float16 backward signals that are exactly zero: small ones are rounded to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.dtensor import local_tensor
from gradwatch.measure.modules import MAX_TENSORS, GradOutputCallback, ModuleStatistic
from gradwatch.measure.reductions import gathered


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
    """Counts the non-zero values of every float16 signal as it arrives, and keeps no signal."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, int, int]] = []
        """Count, site and elements of each signal, in one: autograd has a thread for each device."""

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        return None if kind else _zero_count_callback(self, site)

    def collect(self, layout: Layout) -> Fp16ZerosReading | None:
        found, self.found = self.found, []
        if not found:
            return None
        counts, sites, sizes = zip(*found, strict=True)
        return Fp16ZerosReading(layout, {"half_nonzero": gathered(counts)}, [*sites], [*sizes])


def _zero_count_callback(statistic: Fp16Zeros, site: int) -> GradOutputCallback:
    def on_grad_output(gradient: Tensor) -> None:
        if gradient.dtype is not torch.float16 or len(statistic.found) >= MAX_TENSORS:
            return
        values = local_tensor(gradient.detach())
        if values.layout is torch.strided and values.numel():
            statistic.found.append((torch.count_nonzero(values), site, values.numel()))

    return on_grad_output
