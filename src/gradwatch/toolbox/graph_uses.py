"""Finds in the autograd graph which nodes use a tensor on the way to others; the graph is not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradwatch.hooks.graph_release import release_in_a_loop
from gradwatch.hooks.hook_set import backward_pass
from gradwatch.hooks.view_gradients import ViewGeometry, register_base_hook
from gradwatch.measure.reductions import version_of
from gradwatch.toolbox.tensor_hooks import OnGradient, TensorHooks, detached


@dataclass(frozen=True, slots=True)
class InputUse:
    """A tensor that needs a gradient, and where it is in the graph before it is used."""

    index: int
    tensor: Tensor
    edge: GradientEdge
    root: Tensor
    """The base of which it is a view, or itself."""
    before: Node | None
    version: int

    @classmethod
    def of(cls, index: int, tensor: Tensor) -> InputUse:
        root = tensor if tensor._base is None else tensor._base
        return cls(index, tensor, get_gradient_edge(tensor), root, root.grad_fn, version_of(tensor))


next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Gives the number that the next node of the graph gets. Each thread counts its own.

torch has no public function for it, nor for `number_of`; tests/toolbox/test_module_calls.py fails if one moves.
"""


def number_of(node: Node) -> int:
    """The number of a node of the graph; the greatest one for a leaf's."""
    number: int = node._sequence_nr()
    return number


def hook_uses(
    tensor_hooks: TensorHooks,
    uses: Sequence[InputUse],
    outputs: Sequence[Tensor],
    begun: int,
    on_grad_input: Callable[..., object],
) -> None:
    """Call `on_grad_input(index, gradient, more=False)` with the sum of the gradients that each tensor gets from its
    uses on the way to `outputs`, in nodes from the number `begun` on.
    """
    sums = [GradientSum(partial(on_grad_input, use.index, more=False)) for use in uses]
    for use, total in zip(uses, sums, strict=True):
        hook_if_edited(tensor_hooks, use, outputs, total.set, total.fired)
    for node, gradient_index, use_index in consumers(outputs, [use.edge for use in uses], begun):
        tensor_hooks.add(node.register_hook(partial(sums[use_index].add, gradient_index)))


def hook_if_edited(
    tensor_hooks: TensorHooks, use: InputUse, outputs: Sequence[Tensor], on_gradient: OnGradient, fired: list[bool]
) -> bool:
    """Call `on_gradient` with the gradient of an input that is a view and is edited in place: by the module, which has
    returned `outputs`, or later, if it is among these. Returns whether the module has edited it.

    Autograd rewrites the graph of such a view. Its gradient is taken at its first edit or, where it is edited later and
    nothing else has `fired`, from its base.
    """
    if version_of(use.tensor) != use.version:
        edit = _first_edit(use.root, use.before) if use.tensor is not use.root else None
        if edit is not None:
            geometry = ViewGeometry.of(use.tensor, use.root)
            tensor_hooks.add(edit.register_hook(partial(_at_edit, on_gradient, geometry)))
        return edit is not None
    if any(tensor._base is use.root for tensor in outputs):
        release_in_a_loop(use.root.grad_fn)
        if (on_base := register_base_hook(use.tensor, on_gradient, fired)) is not None:
            tensor_hooks.add(on_base[0])
    return False


def _first_edit(root: Tensor, before: Node | None) -> Node | None:
    """The first in-place edit of `root` after `before` computed its value; None where there is none."""
    node = root.grad_fn
    release_in_a_loop(node)
    while node is not None and node is not before:
        earlier = node.next_functions[0][0] if node.next_functions else None
        if earlier is not None and earlier is before:
            return node
        node = earlier
    return None


def _at_edit(
    on_gradient: OnGradient, geometry: ViewGeometry, gradients: Sequence[Tensor | None], _: object
) -> tuple[Tensor | None, ...] | None:
    """The hook on an in-place edit: of the gradients that it returns, the first is that of the value before it."""
    gradient = gradients[0]
    if gradient is None:
        return None
    new = on_gradient(geometry.extract(gradient))
    return None if new is None else (geometry.insert(gradient, new), *gradients[1:])


def inner_outputs(outputs: Sequence[Tensor], begun: int) -> set[int]:
    """Ids of those `outputs` from which others are computed, in nodes from the number `begun` on: h of (h, f(h))."""
    made = [tensor for tensor in outputs if tensor.requires_grad and not tensor.is_leaf]
    if len(made) < 2:
        return set()
    edges = [get_gradient_edge(tensor) for tensor in made]
    return {id(made[index]) for _, _, index in consumers(made, edges, begun)}


def consumers(outputs: Sequence[Tensor], inputs: Sequence[GradientEdge], begun: int) -> Iterator[tuple[Node, int, int]]:
    """(node, index of its gradient, index in `inputs`), for each use of `inputs` on the way to `outputs` in nodes from
    the number `begun` on. Older nodes lead to a module by its state, and behind a node of this thread all are older.

    A node that another thread has made, as CUDA's backward pass of a `torch.autograd.grad(create_graph=True)` inside
    the module does, has a number of that thread's.
    """
    input_indices = {(edge.node, edge.output_nr): index for index, edge in enumerate(inputs)}
    waiting = [tensor.grad_fn for tensor in outputs]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or number_of(node) < begun:
            continue
        seen.add(node)
        for gradient_index, (source, output_nr) in enumerate(node.next_functions):
            input_index = input_indices.get((source, output_nr)) if source is not None else None
            if input_index is not None:
                yield node, gradient_index, input_index
            waiting.append(source)


class GradientSum:
    """Adds up the parts of a gradient in each backward pass, and calls `on_gradient` with the sum after each part."""

    def __init__(self, on_gradient: Callable[[Tensor], object]) -> None:
        self.on_gradient = on_gradient
        self.last_pass = -1
        self.total: Tensor | None = None
        self.fired = [False]
        """Whether a part has been added since `register_base_hook` last looked."""

    def add(self, gradient_index: int, gradients: Sequence[Tensor | None], _: object) -> None:
        """The hook on a node: of the `gradients` that it returns, the one at `gradient_index` is a part."""
        part, this_pass = gradients[gradient_index], backward_pass()
        part = None if part is None else detached(part)
        if part is None:
            return
        self.total = part if self.total is None or this_pass != self.last_pass else self.total + part
        self.last_pass, self.fired[0] = this_pass, True
        self.on_gradient(self.total)

    def set(self, gradient: Tensor) -> None:
        """Receives the whole gradient at once."""
        self.on_gradient(gradient)
