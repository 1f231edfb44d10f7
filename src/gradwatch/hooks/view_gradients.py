"""Where a view lies in what it is a view of: cut out of its gradient, and put back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ViewWindow:
    """A place in a tensor, by size, stride and offset in elements. No tensor is kept."""

    whole: tuple[tuple[int, ...], tuple[int, ...]]
    """Size and stride."""
    part: tuple[tuple[int, ...], tuple[int, ...], int]
    """Size, stride and offset, in elements."""

    @classmethod
    def of(cls, view: Tensor, root: Tensor) -> ViewWindow:
        offset = int(view.storage_offset() - root.storage_offset())
        return cls((tuple(root.shape), root.stride()), (tuple(view.shape), view.stride(), offset))

    def copy(self, whole: Tensor) -> Tensor:
        """`whole` with its elements where those of the root are."""
        size, stride = self.whole
        return whole.new_empty_strided(size, stride).copy_(whole)

    def look(self, whole: Tensor) -> Tensor:
        if self.part == (*self.whole, 0):
            return whole
        size, stride, offset = self.part
        return self.copy(whole).as_strided(size, stride, offset)

    def fill(self, whole: Tensor, part: Tensor) -> Tensor:
        if self.part == (*self.whole, 0):
            return part
        new = self.copy(whole)
        size, stride, offset = self.part
        new.as_strided(size, stride, offset).copy_(part)
        return new


def edits_of(tensor: Tensor) -> Tensor:
    """A tensor without elements, which keeps none, yet counts the in-place edits of `tensor` as its own."""
    count = tensor.detach()
    count.data = _nothing(tensor.dtype, tensor.device)
    return count


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)
