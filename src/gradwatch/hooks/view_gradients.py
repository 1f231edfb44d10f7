"""Hooks on the present value of a tensor, which may be a view that is edited in place later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True, slots=True)
class ViewGeometry:
    """Where a view lies in its base, by size, stride and offset in elements. No tensor is kept."""

    base: tuple[tuple[int, ...], tuple[int, ...]]
    """Size and stride of the base."""
    view: tuple[tuple[int, ...], tuple[int, ...], int]
    """Size, stride and offset of the view."""

    @classmethod
    def of(cls, view: Tensor, base: Tensor) -> ViewGeometry:
        offset = int(view.storage_offset() - base.storage_offset())
        return cls((tuple(base.shape), base.stride()), (tuple(view.shape), view.stride(), offset))

    def extract(self, gradient: Tensor) -> Tensor:
        """The view's part of `gradient`, the gradient of the base."""
        if self.view == (*self.base, 0):
            return gradient
        size, stride, offset = self.view
        return self._copy(gradient).as_strided(size, stride, offset)

    def insert(self, gradient: Tensor, part: Tensor) -> Tensor:
        """A copy of `gradient`, the gradient of the base, in which `part` replaces the view's part."""
        if self.view == (*self.base, 0):
            return part
        new = self._copy(gradient)
        size, stride, offset = self.view
        new.as_strided(size, stride, offset).copy_(part)
        return new

    def _copy(self, gradient: Tensor) -> Tensor:
        """`gradient` with the strides of the base, so that the view's strides fit it."""
        size, stride = self.base
        return gradient.new_empty_strided(size, stride).copy_(gradient)


def register_value_hook(tensor: Tensor, hook: Callable[[Tensor | None], Any]) -> list[RemovableHandle]:
    """Call `hook` with the gradient of the present value of `tensor`, a non-leaf that needs a gradient; with None where
    a custom Function gives it none. What it returns replaces the gradient, unless it is None.

    A later in-place edit does not affect a hook on a tensor. A view is different, as the output of nn.Linear with three
    and more dimensions is: autograd records the edit on the base, and the view's hook is not called.
    """
    on_base = None if tensor._base is None else register_base_hook(tensor, hook, [False])
    if on_base is None:
        return [tensor.register_hook(hook)]
    handle, edited = on_base

    def on_view(gradient: Tensor | None) -> Tensor | None:
        if torch.compiler.is_compiling():  # compiled autograd
            return None
        return None if edited() else hook(gradient)  # the part from before an edit is in the base's gradient

    return [handle, tensor.register_hook(on_view)]


def register_base_hook(
    view: Tensor, hook: Callable[[Tensor], Tensor | None], fired: list[bool]
) -> tuple[RemovableHandle, Callable[[], bool]] | None:
    """If `view` is edited in place after this call and has not `fired`, call `hook` with its part of the gradient of
    its base. Autograd records such an edit in the graph of the base, and the gradient no longer passes the view. The
    part includes the gradients of all other uses of the same values.

    Returns the handle, and a function that says whether the view has been edited; None where it cannot be hooked.
    """
    base: Tensor = view if view._base is None else view._base
    if base.grad_fn is None or type(view) is not Tensor or base.dtype != view.dtype:
        return None  # an edit cannot be differentiated, or this kind of tensor has no version counter
    try:
        counter, version = view.detach(), view._version
        counter.data = view.new_empty(0)  # it shares the version counter and does not hold the memory
    except RuntimeError:
        return None  # a wrapper inside torch.func has none either
    whole = view.numel() == base.numel() and view.is_contiguous() and base.is_contiguous()
    geometry, shape, output_number = None if whole else ViewGeometry.of(view, base), view.shape, base.output_nr

    def edited() -> bool:
        return counter._version != version

    def on_base(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if torch.compiler.is_compiling():
            return None
        already_fired, fired[0] = fired[0], False
        gradient = gradients[output_number]
        if already_fired or gradient is None or not edited():
            return None
        new = hook(gradient.reshape(shape) if geometry is None else geometry.extract(gradient))
        if new is None:
            return None
        replaced = new.reshape(gradient.shape) if geometry is None else geometry.insert(gradient, new)
        return (*gradients[:output_number], replaced, *gradients[output_number + 1 :])

    return base.grad_fn.register_prehook(on_base), edited
