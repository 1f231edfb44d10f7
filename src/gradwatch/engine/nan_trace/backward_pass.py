"""Runs one backward pass and looks at each node: which first made a gradient not finite that reached a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwatch.engine.nan_trace.call_recorder import TorchCall
from gradwatch.engine.nan_trace.values import dtype_of, finiteness_of, worst_finiteness
from gradwatch.hooks.graph_release import LEAF, release_in_a_loop
from gradwatch.hooks.hook_set import HookSet


def first_nonfinite_node(
    loss: Tensor, factor: float, calls: Mapping[Any, TorchCall]
) -> tuple[str, list[TorchCall | None], str] | None:
    """Run the backward pass of `loss`, 0-d, times `factor`, and find the first node that made a gradient not finite
    which reached a parameter; None without one.

    `calls`: node -> the call that created it. Returns the name of the node; the calls that created it and the nodes
    that its gradient reached, the nearest first; and the dtype of what the node received.
    """
    returned: dict[Any, tuple[bool, ...]] = {}
    """Node -> whether each gradient that it returned is not finite."""
    suspects: list[tuple[Any, str]] = []
    """The nodes that received finite gradients and returned others, and the dtype of what they received."""

    def on_node(node: Any, grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
        received = [tensor for tensor in grad_outputs if tensor is not None]
        returned[node] = bad = tuple(tensor is not None and bool(finiteness_of(tensor)) for tensor in grad_inputs)
        if any(bad) and not worst_finiteness(received):
            suspects.append((node, dtype_of(received)))

    release_in_a_loop(loss.grad_fn)
    with HookSet() as hooks:
        hooked: set[Any] = set()
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in hooked:
                hooked.add(node)
                hooks.add(node.register_hook(partial(on_node, node)))
                waiting += [before for before, _ in node.next_functions]
        with torch.enable_grad():
            (loss * factor).backward()
    for node, dtype in suspects:
        reached, at_parameter = [node], False
        seen = {node}
        for at in reached:
            for (before, _), bad in zip(at.next_functions, returned.get(at, ()), strict=False):
                if bad and before is not None:
                    at_parameter |= before.name().endswith(LEAF)
                    if before not in seen:
                        seen.add(before)
                        reached.append(before)
        if at_parameter:
            return node.name().rpartition("::")[2], [calls.get(at) for at in reached], dtype
    return None
