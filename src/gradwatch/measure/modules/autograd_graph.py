"""The autograd graph by the names of its nodes: what made a tensor, of which parameters, and what flows back there."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from gradwatch.hooks.hook_set import Account
from gradwatch.measure.reductions import here

LEAF = "AccumulateGrad"
"""The kind of the nodes that put gradients into leaves."""

# fmt: off
VIEWS = frozenset({
    "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Squeeze", "T", "ToCopy", "Transpose",
    "Unflatten", "UnsafeView", "Unsqueeze", "View",
})
# fmt: on
"""Kinds of nodes that hand numbers on as they are, in another shape or type."""


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
    """The leaf that `node` hands on as it is, if it does."""
    found = behind_views(node)
    # a name of torch that no list of public names has: tests/rules/test_head_and_tampered.py fails if it moves
    return found.variable if found is not None and kind_of(found) == LEAF else None


def listen(node: Any, heard: Callable[[Tensor], None], account: Account) -> None:
    """Call `heard` with what flows back to `node`, the gradient of its first output, and keep nothing once it is gone.

    It is what `node` works with: whatever hooks on tensors have made of it has been done.
    """

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        begun = perf_counter()
        try:
            gradient = gradients[0]
            if gradient is not None and here(gradient):
                heard(gradient.detach() if gradient.requires_grad else gradient)
        except Exception as error:  # raised here, it would end the user's backward pass
            account.errors.append(error)
        account.under_way += perf_counter() - begun

    node.register_prehook(hook)
