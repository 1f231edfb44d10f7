"""Hooks on the tensors inside a model that also work where views are edited in place, and can all be removed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.hooks.hook_set import remove_all
from gradwatch.hooks.view_gradients import register_value_hook
from gradwatch.measure.reductions import is_vmapped

FIRST_PRUNED_AT = 64
"""Number of handles at which those of freed tensors are first removed. Judgement."""

OnGradient = Callable[[Tensor], Tensor | None]
"""Receives a gradient and returns a replacement, or None to keep it."""


class TensorHooks:
    """Owns hooks on tensors that live for one call of a module. Handles of freed tensors are dropped."""

    def __init__(self) -> None:
        self.closed = False
        self._handles: list[RemovableHandle] = []
        self._prune_at = FIRST_PRUNED_AT

    def hook(self, tensor: Tensor, on_gradient: OnGradient) -> None:
        """Call `on_gradient` with the gradient of the present value of `tensor`, unless it is None; see
        `register_value_hook`.
        """

        def on_tensor(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else on_gradient(gradient)

        for handle in register_value_hook(tensor, on_tensor):
            self.add(handle)

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)
        if len(self._handles) >= self._prune_at:
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._prune_at = max(FIRST_PRUNED_AT, 2 * len(self._handles))

    def remove(self) -> None:
        self.closed = True
        remove_all(self._handles)


def detached(tensor: Tensor) -> Tensor | None:
    """`tensor` without its graph; None in a pass with `is_grads_batched`, whose gradients cannot be kept."""
    try:
        return tensor.detach()
    except RuntimeError:
        if is_vmapped(tensor):
            return None
        raise


def same_view(tensor: Tensor) -> Tensor:
    """A view of the whole tensor, or the tensor itself where its kind has no views."""
    try:
        return tensor.view_as(tensor)
    except RuntimeError:
        return tensor
