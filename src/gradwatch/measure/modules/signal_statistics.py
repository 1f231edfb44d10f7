"""Backward statistics: on sampled steps the norm of dL/d(output) of every layer, and the zeros of float16 ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.dtensor import local_tensor
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.modules import MAX_TENSORS, GradOutputCallback, ModuleReading, ModuleStatistic
from gradwatch.measure.reductions import SAFE_SQUARE, dense_real, exact_norm, is_dense_real, joined, wide_norm

Measured = list[tuple[Tensor, int, int]]
"""Number, site and elements of each signal, in one: autograd has a thread for each device."""


@dataclass(slots=True, eq=False)
class _StepSignals:
    """What has been measured in one sampled step."""

    norms: Measured = field(default_factory=list)
    nonzero: Measured = field(default_factory=list)
    """Of float16 signals, the number of values that are not zero."""
    unsafe: set[int] = field(default_factory=set)
    """Sites whose last float32 norm was 0, infinite or tiny: measured in float64 next time."""


class SignalStatistics(ModuleStatistic):
    """Measures every backward signal as it arrives, and keeps none."""

    def __init__(self, loss_pass: LossPass) -> None:
        self.step = _StepSignals()
        self._loss_pass = loss_pass

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        return None if kind else partial(self._measure, site)

    def collect(self, layout: Layout) -> ModuleReading | None:
        step, self.step = self.step, _StepSignals(unsafe=self.step.unsafe)
        rows = {"signals": step.norms, "half_nonzero": step.nonzero}
        tensors = {name: joined([number for number, _, _ in row]) for name, row in rows.items() if row}
        if not tensors:
            return None
        return ModuleReading(tensors, partial(_values, len(layout.sites), step, frozenset(step.unsafe)))

    def _measure(self, site: int, gradient: Tensor) -> None:
        step = self.step
        if len(step.norms) >= MAX_TENSORS or not self._loss_pass.counts():
            return
        if gradient.requires_grad:
            gradient = gradient.detach()
        values = gradient
        if not is_dense_real(gradient):
            gradient = local_tensor(gradient)
            values = dense_real(gradient)
            if not is_dense_real(values):
                return
        norm = exact_norm(values) if site in step.unsafe else wide_norm(values)
        step.norms.append((norm, site, gradient.numel()))
        if gradient.dtype is torch.float16:
            step.nonzero.append((torch.count_nonzero(values), site, values.numel()))


def _values(n: int, step: _StepSignals, exact: frozenset[int], numbers: Mapping[str, Floats]) -> dict[str, Floats]:
    """`signal_norm`, `signal_rms` and, if any signal was float16, `half_zeros`: one number for each of `n` sites, NaN
    for layers without one.

    Over several outputs or calls of a layer: sqrt(sum |s|^2). A layer whose signal float32 squares cannot hold has no
    norm at this step, and is measured in float64 at the next sample, at which it is `exact`; beside a huge one the
    total has none either. `half_zeros` is the share of zeros.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        squares, elements = _sums(step.norms, numbers["signals"] ** 2, n)
        total = np.sqrt(squares)
        total[elements == 0] = np.nan
        unsafe = np.isinf(total) | (total * total < SAFE_SQUARE * elements)
        huge = False
        for site in np.flatnonzero(unsafe).tolist():
            step.unsafe.add(site)
            if site not in exact:
                huge |= np.isinf(total[site])
                total[site] = np.nan
        step.unsafe.difference_update(np.flatnonzero(~unsafe).tolist())
        measured = ~np.isnan(total)
        elements[0] = elements[measured].sum()
        total[0] = np.sqrt(np.square(total[measured]).sum()) if elements[0] and not huge else np.nan
        found = {"signal_norm": total, "signal_rms": total / np.sqrt(elements)}
        if step.nonzero:
            nonzero, elements = _sums(step.nonzero, numbers["half_nonzero"], n)
            nonzero[0], elements[0] = nonzero.sum(), elements.sum()
            found["half_zeros"] = 1.0 - nonzero / elements
    return found


def _sums(measured: Measured, numbers: Floats, n: int) -> tuple[Floats, Floats]:
    """The sums of `numbers` and of the elements of each of `n` sites."""
    _, sites, sizes = zip(*measured, strict=True)
    sums, elements = (np.bincount(sites, each, n).astype(np.float64, copy=False) for each in (numbers, sizes))
    return sums, elements
