"""Watches one backward pass node by node: which was the first to spoil a gradient that reached a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwatch.engine.nan_trace.values import dtype_of, state_of, worst
from gradwatch.hooks.graph_release import release_in_a_loop
from gradwatch.hooks.hook_set import HookSet


@dataclass(slots=True)
class _Passage:
    """What went through a node: whether it was not finite, coming in and going out to each of those before it."""

    came_bad: bool = False
    went_bad: tuple[bool, ...] = ()
    dtype: str = ""


class BackwardTrace:
    """A backward pass from a loss, of which every node is looked at. `close` it afterwards."""

    def __init__(self, loss: Tensor) -> None:
        """`loss`: 0-d, with its graph."""
        self._hooks = HookSet()
        self._nodes: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._passed: dict[int, _Passage] = {}
        self._bad: list[int] = []
        release_in_a_loop(loss.grad_fn)
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._numbers:
                continue
            number = self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
            # a hook that held its node would keep the graph alive for ever
            self._hooks.add(node.register_hook(partial(self._pass, number)))
            waiting += [before for before, _ in node.next_functions]

    def run(self, loss: Tensor, factor: float) -> tuple[list[Any], str] | None:
        """Go back from `loss` times `factor`. The node that did it, followed by those to which what it made came, the
        nearest first; and the dtype of what came to it.
        """
        with torch.enable_grad():
            (loss * factor).backward()
        for number in self._bad:
            passage = self._passed[number]
            if not passage.came_bad and (reached := self._reached(number)):
                return [self._nodes[at] for at in reached], passage.dtype
        return None

    def close(self) -> None:
        """Let go of the graph."""
        self._hooks.remove()
        self._nodes.clear()
        self._numbers.clear()

    def _pass(self, number: int, went: Sequence[Tensor | None], came: Sequence[Tensor | None]) -> None:
        there = [tensor for tensor in came if tensor is not None]
        bad = tuple(tensor is not None and bool(state_of(tensor)) for tensor in went)
        self._passed[number] = _Passage(bool(worst(there)), bad, dtype_of(there))
        if any(bad):
            self._bad.append(number)

    def _reached(self, number: int) -> list[int]:
        """The nodes to which what this one made came, itself the first; none where it came to no parameter."""
        seen, known, arrived = [number], {number}, False
        for at in seen:
            passage = self._passed.get(at, _Passage())
            for (before, _), bad in zip(self._nodes[at].next_functions, passage.went_bad, strict=False):
                if not bad or before is None:
                    continue
                arrived |= before.name().endswith("AccumulateGrad")
                if self._numbers[before] not in known:
                    known.add(self._numbers[before])
                    seen.append(self._numbers[before])
        return seen if arrived else []
