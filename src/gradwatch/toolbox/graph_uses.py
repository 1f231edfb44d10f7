"""Who uses a tensor on the way to others: read off the autograd graph, which stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradwatch.hooks.graph_release import release_in_a_loop
from gradwatch.hooks.view_gradients import ViewGeometry
from gradwatch.measure.reductions import version_of
from gradwatch.toolbox.tensor_hooks import TensorHooks, detached, first_edit


class Told(Protocol):
    def __call__(self, number: int, gradient: Tensor, *, more: bool) -> object: ...


@dataclass(frozen=True, slots=True)
class Use:
    """A tensor that needs a gradient, and its place in the graph before it is used."""

    number: int
    tensor: Tensor
    edge: GradientEdge
    root: Tensor
    """What it is a view of, or itself."""
    before: Node | None
    version: int

    @classmethod
    def of(cls, number: int, tensor: Tensor) -> Use:
        root = tensor if tensor._base is None else tensor._base
        return cls(number, tensor, get_gradient_edge(tensor), root, root.grad_fn, version_of(tensor))


def hook_uses(
    flowing: TensorHooks, uses: Sequence[Use], outputs: Sequence[Tensor], told: Told, backward_pass: Callable[[], int]
) -> None:
    """Tell `told(number, gradient)` the sum of what comes back to each tensor from its use on the way to `outputs`.

    In-place edits of views lead past them: such a one is taken at its first edit, or, where only `outputs` are edited
    later, from what it is a view of.
    """
    sums = [Sum(partial(told, use.number, more=False), backward_pass) for use in uses]
    for use, parts in zip(uses, sums, strict=True):
        if version_of(use.tensor) != use.version:
            edit = first_edit(use.root, use.before) if use.tensor is not use.root else None
            if edit is not None:
                flowing.hook_edit(edit, ViewGeometry.of(use.tensor, use.root), parts.tell)
        elif any(tensor._base is use.root for tensor in outputs):
            release_in_a_loop(use.root.grad_fn)
            flowing.hook_base(use.tensor, parts.tell, parts.fired)
    edges = [use.edge for use in uses]
    for node, place, number in consumers(outputs, edges, {edge.node for edge in edges}):
        flowing.hook_node(node, partial(sums[number].add, place))


def parts_of_others(outputs: Sequence[Tensor], ends: Collection[Node | None]) -> set[int]:
    """Ids of those `outputs` of which others are made: h of (h, f(h)). Nothing behind `ends` is looked at."""
    made = [tensor for tensor in outputs if tensor.requires_grad and not tensor.is_leaf]
    if len(made) < 2:
        return set()
    edges = [get_gradient_edge(tensor) for tensor in made]
    return {id(made[number]) for _, _, number in consumers(made, edges, ends)}


def consumers(
    outputs: Sequence[Tensor], inputs: Sequence[GradientEdge], ends: Collection[Node | None]
) -> Iterator[tuple[Node, int, int]]:
    """(node, which of its gradients, which of `inputs`), for each use of `inputs` on the way to `outputs`.

    Nothing behind `ends` is looked at.
    """
    places = {(edge.node, edge.output_nr): number for number, edge in enumerate(inputs)}
    waiting = [tensor.grad_fn for tensor in outputs]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        for place, (user, output) in enumerate(node.next_functions):
            number = places.get((user, output)) if user is not None else None
            if number is not None:
                yield node, place, number
            waiting.append(user)


class Sum:
    """A gradient as its parts come, in one backward pass after the other: tells what there is so far."""

    def __init__(self, told: Callable[[Tensor], object], backward_pass: Callable[[], int]) -> None:
        self.told = told
        self.backward_pass = backward_pass
        self.last = -1
        self.total: Tensor | None = None
        self.fired = [False]
        """Whether a part has come, until somebody takes notice."""

    def add(self, place: int, gradients: Sequence[Tensor | None], _: object) -> None:
        """The hook on a node: `gradients` are those it passes on, and the one at `place` is a part."""
        part, now = gradients[place], self.backward_pass()
        part = None if part is None else detached(part)
        if part is None:
            return
        self.total = part if self.total is None or now != self.last else self.total + part
        self.last, self.fired[0] = now, True
        self.told(self.total)

    def tell(self, gradient: Tensor) -> None:
        """All of it at once."""
        self.told(gradient)
