"""Hooks on tensors that flow through a model: past in-place edits of views, and all of them removable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradwatch.hooks.graph_release import release_in_a_loop
from gradwatch.hooks.view_gradients import ViewGeometry, edit_counter
from gradwatch.measure.reductions import is_vmapped, version_of

PRUNED_AT = 64
"""Handles before the first look for those whose tensors are gone. Judgement."""

Told = Callable[[Tensor], Tensor | None]
"""Told a gradient; gives back what is to flow instead, None for the same."""


class TensorHooks:
    """Owns hooks on tensors, which come and go with every call. Those whose tensors are gone are forgotten.

    A hook on a tensor stays with the value that it had: a later in-place edit does not disturb it. Not so on a view:
    autograd writes the edit into what it is a view of, and leads past the view.
    """

    def __init__(self) -> None:
        self.closed = False
        self._handles: list[RemovableHandle] = []
        self._most = PRUNED_AT

    def hook(self, tensor: Tensor, told: Told, *, base: bool = True) -> None:
        """Tell `told` the gradient of `tensor`, which needs one and is no leaf, as it is now. `base`: of a view that is
        edited in place later too, by `hook_base`.
        """
        fired = [False]
        edited = self.hook_base(tensor, told, fired) if base and tensor._base is not None else None

        def direct(gradient: Tensor | None) -> Tensor | None:
            if edited is not None and edited():
                return None  # this is the part from before the edit
            fired[0] = True
            return None if gradient is None else told(gradient)

        self._add(tensor.register_hook(direct))

    def hook_base(self, view: Tensor, told: Told, fired: list[bool]) -> Callable[[], bool] | None:
        """Should `view` be edited in place from now on and not have `fired`: tell its part of the gradient of what it
        is a view of, as that was before. Whoever else used that value has a share in it.

        Gives back what says whether it has been edited; None where it is not hooked.
        """
        root = view if view._base is None else view._base
        if root.grad_fn is None or type(view) is not Tensor or root.dtype != view.dtype:
            return None  # no edit can be differentiated; other kinds of tensors cannot be counted so
        try:
            counter, before = edit_counter(view), version_of(view)
        except RuntimeError:
            return None  # nor can stand-ins inside torch.func
        edge, geometry = get_gradient_edge(root), ViewGeometry.of(view, root)

        def edited() -> bool:
            return version_of(counter) != before

        def indirect(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            had, fired[0] = fired[0], False
            gradient = gradients[edge_number]
            if had or gradient is None or not edited():
                return None
            new = told(geometry.extract(gradient))
            if new is None:
                return None
            filled = geometry.insert(gradient, new)
            return *gradients[:edge_number], filled, *gradients[edge_number + 1 :]

        edge_number = edge.output_nr
        self._add(edge.node.register_prehook(indirect))
        return edited

    def hook_edit(self, node: Node, geometry: ViewGeometry, told: Told) -> None:
        """Tell the gradient that the in-place edit `node` passes on, of the value before it."""
        self.hook_node(node, partial(_at_edit, told, geometry))

    def hook_node(self, node: Node, hook: Callable[[Sequence[Tensor | None], object], Any]) -> None:
        """Call `hook(what it passes on, what it was given)` after `node` in a backward pass."""
        self._add(node.register_hook(hook))

    def _add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)
        if len(self._handles) >= self._most:
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._most = max(PRUNED_AT, 2 * len(self._handles))

    def remove(self) -> None:
        self.closed = True
        while self._handles:
            self._handles.pop().remove()


def detached(tensor: Tensor) -> Tensor | None:
    """`tensor` without its graph; None for a gradient of a pass with `is_grads_batched`, which lets nobody keep it."""
    try:
        return tensor.detach()
    except RuntimeError:
        if is_vmapped(tensor):
            return None
        raise


def first_edit(root: Tensor, before: Node | None) -> Node | None:
    """The first in-place edit of `root` since `before` gave it its value; None where there is none."""
    node = root.grad_fn
    release_in_a_loop(node)
    while node is not None and node is not before:
        earlier = node.next_functions[0][0] if node.next_functions else None
        if earlier is not None and earlier is before:
            return node
        node = earlier
    return None


def same_view(tensor: Tensor) -> Tensor:
    """A view of all of it, or, where its kind has none, itself."""
    try:
        return tensor.view_as(tensor)
    except (RuntimeError, NotImplementedError):
        return tensor


def _at_edit(
    told: Told, geometry: ViewGeometry, gradients: Sequence[Tensor | None], _: object
) -> tuple[Tensor | None, ...] | None:
    gradient = gradients[0]
    if gradient is None:
        return None
    new = told(geometry.extract(gradient))
    return None if new is None else (geometry.insert(gradient, new), *gradients[1:])
