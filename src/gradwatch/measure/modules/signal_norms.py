"""The norm of the backward signal, dL/d(output), of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.dtensor import local_tensor
from gradwatch.measure.modules import MAX_TENSORS, GradOutputCallback, ModuleStatistic
from gradwatch.measure.reductions import SAFE_SQUARE, dense_real, exact_norm, gathered, is_dense_real, wide_type


@dataclass(slots=True, eq=False)
class _StepNorms:
    """What has been measured in one sampled step."""

    found: list[tuple[Tensor, int, int]] = field(default_factory=list)
    """Norm, site and elements of each signal, in one: autograd has a thread for each device."""
    unsafe: set[int] = field(default_factory=set)
    """Sites whose last float32 norm was 0, infinite or tiny: measured in float64 next time."""


@dataclass(frozen=True, slots=True, eq=False)
class SignalNormReading:
    """The norms of one step, on the device."""

    layout: Layout
    tensors: Mapping[str, Tensor]
    sites: list[int]
    sizes: list[int]
    exact: frozenset[int]
    unsafe: set[int]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """`signal_norm` and `signal_rms`, one number per site, NaN for layers without a signal.

        Over several outputs or calls of a layer: sqrt(sum |s|^2). A layer whose signal float32 squares cannot hold has
        no number at this step, and is measured in float64 at the next sample.
        """
        norms, n = numbers["signals"], len(self.layout)
        elements = np.bincount(self.sites, weights=self.sizes, minlength=n)
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.sqrt(np.bincount(self.sites, weights=norms**2, minlength=n))
            total[elements == 0] = np.nan
            unsafe = np.isinf(total) | (total * total < SAFE_SQUARE * elements)
            for site in np.flatnonzero(unsafe):
                self.unsafe.add(int(site))
                if site not in self.exact:
                    total[site] = np.nan
            self.unsafe.difference_update(np.flatnonzero(~unsafe).tolist())
            measured = ~np.isnan(total)
            elements[0] = elements[measured].sum()
            total[0] = np.sqrt(np.square(total[measured]).sum()) if elements[0] else np.nan
            return {"signal_norm": total, "signal_rms": total / np.sqrt(elements)}


class SignalNorms(ModuleStatistic):
    """Takes the norm of every backward signal as it arrives, and keeps no signal."""

    def __init__(self) -> None:
        self.step = _StepNorms()

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        return None if kind else _norm_callback(self, site)

    def collect(self, layout: Layout) -> SignalNormReading | None:
        step, self.step = self.step, _StepNorms(unsafe=self.step.unsafe)
        if not step.found:
            return None
        norms, sites, sizes = zip(*step.found, strict=True)
        return SignalNormReading(
            layout, {"signals": gathered(norms)}, [*sites], [*sizes], frozenset(step.unsafe), step.unsafe
        )


def _norm_callback(statistic: SignalNorms, site: int) -> GradOutputCallback:
    def on_grad_output(gradient: Tensor) -> None:
        step = statistic.step
        if len(step.found) >= MAX_TENSORS:
            return
        if gradient.requires_grad:
            gradient = gradient.detach()
        values = gradient
        if not is_dense_real(gradient):
            gradient = local_tensor(gradient)
            values = dense_real(gradient)
            if not is_dense_real(values):
                return
        if site in step.unsafe:
            norm = exact_norm(values)
        elif values.dtype is torch.float32:
            norm = torch.linalg.vector_norm(values)  # without naming its type, a fifth faster
        else:
            norm = torch.linalg.vector_norm(values, dtype=wide_type(values))
        step.found.append((norm, site, gradient.numel()))

    return on_grad_output
