"""What a device can do, and copies from one device to another."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def has_float64(device: torch.device) -> bool:
    """Whether `device` computes in float64: MPS does not, and of Intel's GPUs (XPU) not every one."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def widest_type(device: torch.device) -> torch.dtype:
    """The widest type of floats that `device` has."""
    return torch.float64 if has_float64(device) else torch.float32


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`tensor` on `device`, of `dtype` if given, in float32 where it would be float64 and `device` has none.

    The host waits only for a copy to its own memory: it could read there what has not landed yet.
    """
    dtype = tensor.dtype if dtype is None else dtype
    if dtype is torch.float64 and not has_float64(device):
        dtype = torch.float32
        tensor = tensor.to(dtype)  # where it is: the copy itself cannot begin as float64
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")


@cache
def is_asynchronous(device: torch.device) -> bool:
    """Whether the host does not wait for what it gives `device` to do: it has streams."""
    if not torch.accelerator.is_available():  # the next line raises in torch 2.6
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def start_copy(tensor: Tensor) -> tuple[Tensor, torch.Event]:
    """Start a copy of `tensor`, on an asynchronous device, to pinned memory of the host: the copy, and what says when
    it has landed. `tensor` may be written again as soon as this returns.
    """
    # torch's allocator of pinned memory reuses blocks, and not before the copy into them is done
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record(torch.accelerator.current_stream(tensor.device))
    return pinned, event


def current_stream(device: torch.device, after: Any = None) -> Any:
    """The stream of `device` that work is given to now, None where there are none. It waits for what was given to the
    stream `after` so far, where that is another one.
    """
    if not is_asynchronous(device):
        return None
    stream = torch.accelerator.current_stream(device)
    if after is not None and after != stream:
        stream.wait_stream(after)
    return stream


def wait_for(devices: set[torch.device]) -> None:
    """Wait for what `devices` were given: other streams may use it from now on, without waiting for this one."""
    for stream in map(current_stream, devices):
        if stream is not None:
            stream.synchronize()
