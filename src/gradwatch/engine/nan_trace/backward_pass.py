"""Checks one backward pass node by node: which node first made a gradient not finite that reached a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwatch.engine.nan_trace.values import dtype_of, finiteness_of, worst_finiteness
from gradwatch.hooks.graph_release import LEAF, release_in_a_loop
from gradwatch.hooks.hook_set import HookSet


@dataclass(slots=True)
class _NodeGradients:
    """Whether the gradients of a node were not finite: any that it received, and each that it returned."""

    nonfinite_in: bool = False
    nonfinite_out: tuple[bool, ...] = ()
    dtype: str = ""


class BackwardTrace:
    """A backward pass from a loss with a hook on every node. `close` it afterwards."""

    def __init__(self, loss: Tensor) -> None:
        """`loss`: 0-d, with its graph."""
        self._hooks = HookSet()
        self._nodes: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._gradients: dict[int, _NodeGradients] = {}
        self._bad: list[int] = []
        release_in_a_loop(loss.grad_fn)
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._numbers:
                continue
            number = self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
            # the hook has the node's number: one that held the node would keep the graph alive
            self._hooks.add(node.register_hook(partial(self._on_node, number)))
            waiting += [before for before, _ in node.next_functions]

    def run(self, loss: Tensor, factor: float) -> tuple[list[Any], str] | None:
        """Run the backward pass of `loss` times `factor`. Returns the first node that made a gradient not finite,
        followed by the nodes that this gradient reached, the nearest first; and the dtype of what the node received.
        """
        with torch.enable_grad():
            (loss * factor).backward()
        for number in self._bad:
            gradients = self._gradients[number]
            if not gradients.nonfinite_in and (reached := self._reached(number)):
                return [self._nodes[at] for at in reached], gradients.dtype
        return None

    def close(self) -> None:
        """Remove the hooks and drop the graph."""
        self._hooks.remove()
        self._nodes.clear()
        self._numbers.clear()

    def _on_node(
        self, number: int, grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]
    ) -> None:
        received = [tensor for tensor in grad_outputs if tensor is not None]
        bad = tuple(tensor is not None and bool(finiteness_of(tensor)) for tensor in grad_inputs)
        self._gradients[number] = _NodeGradients(bool(worst_finiteness(received)), bad, dtype_of(received))
        if any(bad):
            self._bad.append(number)

    def _reached(self, number: int) -> list[int]:
        """The nodes that a gradient which is not finite reached from this one, itself first; none where it reached no
        parameter.
        """
        reached, seen, at_parameter = [number], {number}, False
        for at in reached:
            gradients = self._gradients.get(at, _NodeGradients())
            for (before, _), bad in zip(self._nodes[at].next_functions, gradients.nonfinite_out, strict=False):
                if not bad or before is None:
                    continue
                at_parameter |= before.name().endswith(LEAF)
                if self._numbers[before] not in seen:
                    seen.add(self._numbers[before])
                    reached.append(self._numbers[before])
        return reached if at_parameter else []
