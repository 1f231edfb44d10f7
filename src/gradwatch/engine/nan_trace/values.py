"""Properties of a tensor in a recorded run: finiteness, range of values, and address in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from gradwatch.engine.nan_trace.operations import InputSummary
from gradwatch.measure.device_buffer import on_host
from gradwatch.measure.devices import widest_type


class Finiteness(IntEnum):
    """The worst kind of value in a tensor; larger is worse."""

    FINITE = 0
    INF = 1
    NAN = 2

    @property
    def word(self) -> str:
        return "NaN" if self is Finiteness.NAN else "infinity"


def input_summary(value: object) -> InputSummary | None:
    """Summary of a tensor or a number; None for anything else."""
    if isinstance(value, Tensor):
        if value.dtype is torch.bool:
            return InputSummary("bool", value.numel(), tuple(value.shape), 0.0, 1.0, 0)
        if not value.is_floating_point() or value.is_sparse:
            return None
        name, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        if not value.numel():
            return InputSummary(name, 0, shape, 0.0, 0.0, 0)
        flat = value.detach().flatten().to(widest_type(value.device))
        finite = flat.isfinite()
        low = torch.where(finite, flat, torch.inf).amin()
        high = torch.where(finite, flat, -torch.inf).amax()
        counts = [(flat == 0).sum(), (flat == -torch.inf).sum()]
        low, high, zeros, masked = on_host(
            torch.stack([low, high, *(count.to(flat.dtype) for count in counts)])
        ).tolist()
        return InputSummary(name, value.numel(), shape, low, high, int(zeros), int(masked))
    if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value):
        return InputSummary("number", 1, (), float(value), float(value), int(value == 0))
    return None


def finiteness_of(tensor: Tensor) -> Finiteness:
    if not tensor.numel() or tensor.is_sparse or not (tensor.is_floating_point() or tensor.is_complex()):
        return Finiteness.FINITE
    tensor = tensor.detach()
    flags = on_host(torch.stack([tensor.isfinite().all(), tensor.isnan().any()]))
    return Finiteness.FINITE if flags[0] else Finiteness.NAN if flags[1] else Finiteness.INF


def worst_finiteness(tensors: Iterable[Tensor]) -> Finiteness:
    return max((finiteness_of(tensor) for tensor in tensors), default=Finiteness.FINITE)


def dtype_of(tensors: Sequence[Tensor]) -> str:
    return next((str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()), "float32")


def nonfinite_examples(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], int]:
    """Of the first tensor that is not finite: the indices in its first dimension at which it is not, and its length."""
    for tensor in tensors:
        if tensor.ndim and tensor.numel() and finiteness_of(tensor):
            bad = ~tensor.detach().reshape(len(tensor), -1).isfinite().all(1)
            return tuple(np.flatnonzero(on_host(bad)).tolist()), len(tensor)
    return (), 0


def storage_address(tensor: Tensor) -> int:
    """The address of its storage; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0
