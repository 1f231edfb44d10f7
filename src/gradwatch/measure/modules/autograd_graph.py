"""Nodes of the autograd graph: their kinds, their inputs, the parameters behind them, and hooks on their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from gradwatch.hooks.hook_set import HookCosts
from gradwatch.measure.reductions import is_dense_real

LEAF = "AccumulateGrad"
"""The kind of the nodes that put gradients into leaves."""

# fmt: off
VIEWS = frozenset({
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Squeeze", "T", "ToCopy", "Transpose",
    "Unflatten", "UnsafeView", "Unsqueeze", "View",
})
# fmt: on
"""Kinds of nodes that change no number, only shape or type."""


def kind_of(node: Any) -> str:
    """What a node of the graph is, as torch's derivatives.yaml calls it: "Addmm" of `AddmmBackward0`."""
    return _kind(node.name())


@lru_cache(maxsize=1024)
def _kind(name: str) -> str:
    return name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def parents(node: Any) -> list[Any]:
    """The nodes that made the inputs of `node`, in the order of its arguments; None for what needs no gradient."""
    return [parent for parent, _ in node.next_functions]


def behind_views(node: Any, *, steps: int = 4) -> Any:
    """The first node on the way from `node` to the leaves that computes something; None if `steps` do not reach it."""
    for _ in range(steps):
        if node is None or kind_of(node) not in VIEWS:
            return node
        node = parents(node)[0]
    return None


def leaf_of(node: Any) -> nn.Parameter | None:
    """The leaf of which `node` is nothing but a view, if it is one."""
    found = behind_views(node)
    # a name of torch that no list of public names has: tests/rules/test_head_and_tampered.py fails if it moves
    return found.variable if found is not None and kind_of(found) == LEAF else None


def register_node_hook(node: Any, on_gradient: Callable[[Tensor], None], costs: HookCosts) -> None:
    """Call `on_gradient` with the gradient of the first output of `node`, as `node` gets it: after all tensor hooks.

    Nothing outlives the node. Time and errors go to `costs`.
    """

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        begun = perf_counter()
        try:
            gradient = gradients[0]
            if gradient is not None and is_dense_real(gradient):
                on_gradient(gradient.detach() if gradient.requires_grad else gradient)
        except Exception as error:  # raised here, it would end the user's backward pass
            costs.errors.append(error)
        costs.current += perf_counter() - begun

    node.register_prehook(hook)
