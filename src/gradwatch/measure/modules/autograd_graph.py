"""Nodes of the autograd graph: their kinds, their inputs, the parameters behind them, and hooks on their gradients."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from gradwatch.hooks.graph_release import LEAF
from gradwatch.hooks.hook_set import HookCosts, recorded
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.reductions import is_dense_real

# fmt: off
VIEWS = frozenset({
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Squeeze", "T", "ToCopy", "Transpose",
    "Unflatten", "UnsafeView", "Unsqueeze", "View",
})
# fmt: on
"""Kinds of nodes that change no number, only shape or type."""

MAX_VIEWS = 4
"""Such nodes in a row that are skipped. Judgement."""


def kind_of(node: Any) -> str:
    """The kind of a node, as torch's derivatives.yaml calls it: "Addmm" of `AddmmBackward0`."""
    return _kind_of_name(node.name())


@lru_cache(maxsize=1024)
def _kind_of_name(name: str) -> str:
    return name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")


def parents(node: Any) -> list[Any]:
    """The nodes that made the inputs of `node`, in the order of its arguments; None for what needs no gradient."""
    return [parent for parent, _ in node.next_functions]


def skip_views(node: Any, kinds: Set[str] = VIEWS) -> Any:
    """The first node from `node` towards the leaves that is of none of these `kinds`, by default those that compute
    nothing; None if `MAX_VIEWS` do not reach it.
    """
    for _ in range(MAX_VIEWS):
        if node is None or kind_of(node) not in kinds:
            return node
        node = parents(node)[0]
    return None


def leaf_of(node: Any) -> nn.Parameter | None:
    """The leaf that `node` is a view of; None if it computes anything."""
    found = skip_views(node)
    # `variable` is not a public name of torch: tests/rules/test_head_and_tampered.py fails if it moves
    return found.variable if found is not None and kind_of(found) == LEAF else None


def register_node_hook(node: Any, on_gradient: Callable[[Tensor], None], costs: HookCosts, loss_pass: LossPass) -> None:
    """Call `on_gradient` with the gradient of the loss for the first output of `node`, after all tensor hooks.

    The hook lives as long as the node. Time and errors are recorded in `costs`.
    """

    def on_node(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[0]
        if gradient is not None and loss_pass.counts() and is_dense_real(gradient):
            on_gradient(gradient.detach() if gradient.requires_grad else gradient)

    node.register_prehook(recorded(on_node, costs))
