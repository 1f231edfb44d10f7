"""Devices that are not at hand: fake tensors, which have a device and no numbers, and copies that land on request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradwatch.measure import devices

HERE, OTHER, HOST = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


class ByOperators(TorchFunctionMode):
    """Calls operators where the methods of tensors themselves need a torch that is built for the device."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is Tensor.__getitem__:
            tensor, index = arguments
            if isinstance(index, int):
                return tensor.select(0, index)
            if isinstance(index, slice):
                start, stop, _ = index.indices(len(tensor))
                return tensor.narrow(0, start, max(0, stop - start))
            if isinstance(index, tuple):
                dims = range(len(index) - 1, -1, -1)  # from the last on: a number takes its dimension away
                for dim, one in zip(dims, reversed(index), strict=True):
                    tensor = tensor if one == slice(None) else tensor.select(dim, one)
                return tensor
            if isinstance(index, Tensor):
                return torch.ops.aten.index(tensor, [index])
        if function is Tensor.__setitem__ and not isinstance(arguments[2], Tensor):
            tensor, index, _ = arguments
            one = isinstance(index, int) and tensor.ndim == 1
            if not tensor.is_cpu and (one or isinstance(index, Tensor)):
                # github.com/pytorch/pytorch/pull/186482 and 186486
                raise AssertionError("torch copies the number to the device, and waits: use fill_, index_fill_")
        if function is Tensor.__invert__:
            return torch.ops.aten.bitwise_not(*arguments)
        if function is Tensor.copy_:
            return torch.ops.aten.copy_(*arguments, **keywords or {})
        if function is Tensor.data_ptr:
            return id(arguments[0])
        if function is Tensor.numpy:
            return np.zeros(tuple(arguments[0].shape))
        if function is Tensor.contiguous:
            return arguments[0] if arguments[0].is_contiguous() else torch.ops.aten.clone(arguments[0])
        return function(*arguments, **keywords or {})


class LandsAtOnce:
    """The mark behind a copy that has landed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def landing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of CUDA's tensors to the host without CUDA: they have landed at once, and hold zeros."""
    monkeypatch.setattr(devices, "is_asynchronous", lambda device: device.type == "cuda")
    monkeypatch.setattr(devices, "start_copy", lambda tensor: (torch.zeros(tensor.shape), LandsAtOnce()))
    monkeypatch.setattr(devices, "current_stream", lambda device, after=None: None)


class LateCopies:
    """Copies of the CPU's tensors that land one by one, when asked to or when they are waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: list[_LateCopy] = []
        self.asked = 0
        monkeypatch.setattr(devices, "is_asynchronous", lambda device: True)
        monkeypatch.setattr(devices, "start_copy", self._start)
        monkeypatch.setattr(devices, "current_stream", lambda device, after=None: None)

    def land(self, place: int) -> None:
        if place < len(self.under_way):
            self.under_way[place].synchronize()

    def land_all(self) -> None:
        while self.under_way:
            self.under_way[0].synchronize()

    def _start(self, tensor: Tensor) -> tuple[Tensor, _LateCopy]:
        host = torch.full_like(tensor, -777.0)
        self.under_way.append(_LateCopy(self, tensor.clone(), host))
        return host, self.under_way[-1]


class _LateCopy:
    def __init__(self, copies: LateCopies, tensor: Tensor, host: Tensor) -> None:
        self._copies, self._tensor, self._host, self._landed = copies, tensor, host, False

    def query(self) -> bool:
        self._copies.asked += 1
        return self._landed

    def synchronize(self) -> None:
        if not self._landed:
            self._landed = True
            self._host.copy_(self._tensor)
            self._copies.under_way.remove(self)


# fmt: off
NO_KERNEL = frozenset({
    "alias", "as_strided", "detach", "device", "empty", "empty_like", "empty_strided", "lift_fresh", "narrow",
    "new_empty", "permute", "reshape", "scalar_tensor", "select", "slice", "split", "split_with_sizes", "t",
    "transpose", "unbind", "unsqueeze", "view",
})
# fmt: on
"""What gives the device nothing to do."""


class Kernels(TorchDispatchMode):
    """The names of the operations that give a device something to do; `_to_copy:host` for a copy to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **keywords or {})
        name = function.overloadpacket.__name__
        if name == "_to_copy" and arguments[0].device.type == "cpu" != result.device.type:
            name += ":host"
        if name not in NO_KERNEL:
            self.names.append(name)
        return result
