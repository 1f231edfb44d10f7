"""What torch is asked to do, seen from below everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    operation.name()
    for operation in (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.item.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    )
}
"""What makes the host wait for the device."""


class Operations(TorchDispatchMode):
    """The names of all operations, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Reads(Operations):
    """Those of them that are scalar reads."""

    @property
    def found(self) -> list[str]:
        return [name for name in self.names if name in READS]

    @property
    def count(self) -> int:
        return len(self.found)
