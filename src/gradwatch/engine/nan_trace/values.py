"""What a tensor of a recorded run holds: whether it is finite, how large it is, and where it is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from gradwatch.engine.nan_trace.operations import Facts
from gradwatch.measure.device_buffer import on_host


class State(IntEnum):
    """What is in a tensor; the larger counts for several."""

    FINITE = 0
    INF = 1
    NAN = 2


def facts_of(value: object) -> Facts | None:
    """What a tensor or a number holds; None for anything else."""
    if isinstance(value, Tensor):
        if value.dtype is torch.bool:
            return Facts("bool", value.numel(), tuple(value.shape), 0.0, 1.0, 0, 0)
        if not value.is_floating_point() or value.is_sparse:
            return None
        name, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        if not value.numel():
            return Facts(name, 0, shape, 0.0, 0.0, 0, 0)
        flat = value.detach().flatten().double()
        fine = flat.isfinite()
        low = torch.where(fine, flat, torch.inf).amin()
        high = torch.where(fine, flat, -torch.inf).amax()
        counts = [(flat == 0).sum(), (flat < 0).sum(), (flat == -torch.inf).sum()]
        numbers = on_host(torch.stack([low, high, *(count.double() for count in counts)]))
        zeros, negatives, masked = (int(number) for number in numbers[2:])
        return Facts(name, value.numel(), shape, float(numbers[0]), float(numbers[1]), zeros, negatives, masked)
    if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value):
        return Facts("number", 1, (), float(value), float(value), int(value == 0), int(value < 0))
    return None


def state_of(tensor: Tensor) -> State:
    if not tensor.numel() or tensor.is_sparse or not (tensor.is_floating_point() or tensor.is_complex()):
        return State.FINITE
    tensor = tensor.detach()
    flags = on_host(torch.stack([tensor.isfinite().all(), tensor.isnan().any()]))
    return State.FINITE if flags[0] else State.NAN if flags[1] else State.INF


def worst(tensors: Iterable[Tensor]) -> State:
    return max((state_of(tensor) for tensor in tensors), default=State.FINITE)


def dtype_of(tensors: Sequence[Tensor]) -> str:
    return next((str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()), "float32")


def examples_in(made: Sequence[Tensor]) -> tuple[tuple[int, ...], int]:
    for tensor in made:
        if tensor.ndim and tensor.numel() and state_of(tensor):
            bad = ~tensor.detach().reshape(len(tensor), -1).isfinite().all(1)
            return tuple(np.flatnonzero(on_host(bad)).tolist()), len(tensor)
    return (), 0


def place_of(tensor: Tensor) -> int:
    """Where its numbers are in memory; 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
