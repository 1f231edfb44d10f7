"""Hooks on the tensors inside a model that also work where views are edited in place, and can all be removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradwatch.hooks.graph_release import release_in_a_loop
from gradwatch.hooks.hook_set import remove_all
from gradwatch.hooks.view_gradients import ViewGeometry, register_base_hook, register_view_hook
from gradwatch.measure.reductions import is_vmapped

FIRST_PRUNED_AT = 64
"""Number of handles at which those of freed tensors are first removed. Judgement."""

OnGradient = Callable[[Tensor], Tensor | None]
"""Receives a gradient and returns a replacement, or None to keep it."""


class TensorHooks:
    """Owns hooks on tensors that live for one call of a module. Handles of freed tensors are dropped.

    A hook on a tensor belongs to the value that the tensor had when it was registered, so a later in-place edit does
    not affect it. A view is different: autograd records the edit on the base, and the view's hook is not called.
    """

    def __init__(self) -> None:
        self.closed = False
        self._handles: list[RemovableHandle] = []
        self._prune_at = FIRST_PRUNED_AT

    def hook(self, tensor: Tensor, on_gradient: OnGradient) -> None:
        """Call `on_gradient` with the gradient of the present value of `tensor`, a non-leaf that needs a gradient, also
        if it is a view that is edited in place later.
        """

        def on_tensor(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else on_gradient(gradient)

        for handle in (
            [tensor.register_hook(on_tensor)] if tensor._base is None else register_view_hook(tensor, on_tensor)
        ):
            self._add(handle)

    def hook_alias(self, alias: Tensor, on_gradient: Callable[[Tensor | None], Tensor | None]) -> None:
        """Call `on_gradient` with the gradient of a view, unless it is edited in place later; with None where a custom
        Function gives it none.
        """
        self._add(alias.register_hook(on_gradient))

    def hook_base(self, view: Tensor, on_gradient: OnGradient, fired: list[bool]) -> None:
        """If `view` is edited in place after this call and has not `fired`, call `on_gradient` with its part of the
        gradient of its base.
        """
        if (found := register_base_hook(view, on_gradient, fired)) is not None:
            self._add(found[0])

    def hook_edit(self, node: Node, geometry: ViewGeometry, on_gradient: OnGradient) -> None:
        """Call `on_gradient` with the gradient that the in-place edit `node` returns, of the value before the edit."""
        self.hook_node(node, partial(_at_edit, on_gradient, geometry))

    def hook_node(self, node: Node, hook: Callable[[Sequence[Tensor | None], object], Any]) -> None:
        """Call `hook(grad_inputs, grad_outputs)` after `node` has run in a backward pass."""
        self._add(node.register_hook(hook))

    def _add(self, handle: RemovableHandle) -> None:
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


def first_edit(root: Tensor, before: Node | None) -> Node | None:
    """The first in-place edit of `root` after `before` computed its value; None where there is none."""
    node = root.grad_fn
    release_in_a_loop(node)
    while node is not None and node is not before:
        earlier = node.next_functions[0][0] if node.next_functions else None
        if earlier is not None and earlier is before:
            return node
        node = earlier
    return None


def same_view(tensor: Tensor) -> Tensor:
    """A view of the whole tensor, or the tensor itself where its kind has no views."""
    try:
        return tensor.view_as(tensor)
    except (RuntimeError, NotImplementedError):
        return tensor


def _at_edit(
    on_gradient: OnGradient, geometry: ViewGeometry, gradients: Sequence[Tensor | None], _: object
) -> tuple[Tensor | None, ...] | None:
    gradient = gradients[0]
    if gradient is None:
        return None
    new = on_gradient(geometry.extract(gradient))
    return None if new is None else (geometry.insert(gradient, new), *gradients[1:])
