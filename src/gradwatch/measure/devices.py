"""What a device can do, and copies from one device to another."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def has_float64(device: torch.device) -> bool:
    """Whether `device` computes in float64: MPS does not, and of Intel's GPUs (XPU) not every one."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`tensor` on `device`, of `dtype` if given, in float32 where it would be float64 and `device` has none.

    The host waits only for a copy to its own memory: it could read there what has not landed yet.
    """
    dtype = tensor.dtype if dtype is None else dtype
    if dtype is torch.float64 and not has_float64(device):
        dtype = torch.float32
        tensor = tensor.to(dtype)  # where it is: the copy itself cannot begin as float64
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")
