"""Whether a softmax or sigmoid is applied twice, by the model and by the loss, as the graph of the loss shows."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.hooks.graph_release import MAX_UNPREPARED, release_in_a_loop
from gradwatch.measure.modules import ModuleStatistic
from gradwatch.measure.modules.autograd_graph import LEAF, VIEWS, kind_of, parents

MAX_LOSS_NODES = 512
"""Nodes visited from the loss on: a loss of a few terms has ten, one summed over a hundred time steps three hundred.
1 us each. Judgement."""

MAX_LAYER_NODES = 24
"""Nodes searched for the layer before such an activation. Judgement: a linear layer has four."""

MAX_NODES_BETWEEN = 16
"""Nodes that may stand between such an activation and the loss. Judgement."""

RANGE_PRESERVING = VIEWS | {
    "Cat", "Clamp", "ClampMin", "Gather", "Index", "IndexSelect", "MaskedSelect", "Mean", "NativeDropout", "Select",
    "Slice", "Split", "Stack", "Unbind",
}  # fmt: skip
"""Kinds of nodes that leave probabilities between 0 and 1, besides views. A product is none of them: a softmax times a
large number is a valid logit."""

LAYER_KINDS = frozenset({"Addmm", "Baddbmm", "Bmm", "Convolution", "Embedding", "Mm", "Mv"})
"""Kinds of nodes at which the model begins and the loss ends, as it does at any node that uses a parameter."""

CROSS_ENTROPY, BINARY_CROSS_ENTROPY = 1.0, 2.0
"""Which loss takes the activation's output as logits: one with a log-softmax, or a binary cross entropy with logits."""


@dataclass(frozen=True, slots=True)
class DoubledActivation:
    """A softmax or sigmoid whose output a loss takes as logits, and so applies another one to."""

    statistic: str
    loss: float
    """`CROSS_ENTROPY` or `BINARY_CROSS_ENTROPY`."""
    parameters: frozenset[int]
    """`id` of the nearest parameters before it."""


@dataclass(frozen=True, slots=True, eq=False)
class LossHeadReading:
    """The doubled activations in the graphs of the losses of one step."""

    layout: Layout
    found: Mapping[str, Mapping[int, float]]
    """Statistic -> site -> loss."""
    tensors: Mapping[str, Tensor]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """`softmax_head` and `sigmoid_head`: 0 for the total where no activation is doubled."""
        values = {}
        for statistic, sites in self.found.items():
            numbers_of = np.full(len(self.layout), np.nan)
            numbers_of[0] = max(sites.values(), default=0.0)
            for site, loss in sites.items():
                numbers_of[site] = loss
            values[statistic] = numbers_of
        return values


class LossHead(ModuleStatistic):
    """Walks the graph from the loss to the last layers of the model, and keeps no node of it.

    The graph can also be walked after the backward pass, while the loss exists.
    """

    def __init__(self) -> None:
        self._layers: list[tuple[int, weakref.ref[nn.Module]]] = []
        """Sites and their modules."""
        self._found: dict[str, dict[int, float]] | None = None

    def on_output(self, site: int, module: nn.Module, kind: str) -> None:
        if not kind:
            self._layers.append((site, weakref.ref(module)))

    def on_loss(self, loss: Tensor) -> None:
        if loss.grad_fn is None:
            return
        if self._found is None:
            self._found = {"softmax_head": {}, "sigmoid_head": {}}
        for doubled in doubled_activations(loss):
            self._found[doubled.statistic] |= dict.fromkeys(self._owners(doubled.parameters) or {0}, doubled.loss)

    def collect(self, layout: Layout) -> LossHeadReading | None:
        found, self._found = self._found, None
        self._layers = []
        return None if found is None else LossHeadReading(layout, found, {})

    def _owners(self, parameters: frozenset[int]) -> set[int]:
        """Sites of the layers that own `parameters`."""
        there = ((site, module()) for site, module in self._layers)
        return {
            site
            for site, module in there
            if module is not None and any(id(parameter) in parameters for parameter in module.parameters(recurse=False))
        }


def doubled_activations(loss: Tensor) -> list[DoubledActivation]:
    """The doubled activations close to `loss`."""
    found: list[DoubledActivation] = []
    # the nodes are held while this runs: otherwise torch frees their Python objects, and ids are reused
    seen: dict[int, Any] = {}
    queue: deque[tuple[Any, bool]] = deque([(loss.grad_fn, False)])
    while queue and len(seen) < MAX_LOSS_NODES:
        node, classes = queue.popleft()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        if len(seen) == MAX_UNPREPARED:
            release_in_a_loop(loss.grad_fn)
        kind, before = kind_of(node), parents(node)
        classes |= kind.startswith("NllLoss")
        if kind == "LogSoftmax":
            found += _activations_before(before[0], CROSS_ENTROPY, sigmoids=classes)
        elif kind == "BinaryCrossEntropyWithLogits":
            found += _activations_before(before[0], BINARY_CROSS_ENTROPY, sigmoids=True)
        elif kind not in LAYER_KINDS and not any(parent is not None and kind_of(parent) == LEAF for parent in before):
            queue.extend((parent, classes) for parent in before)
    return found


def _activations_before(logits: Any, loss: float, *, sigmoids: bool) -> list[DoubledActivation]:
    """The softmax or sigmoid that `logits` come from through nodes that preserve the range; with concatenated logits,
    all parts have to.
    """
    waiting, seen = [logits], 0
    kinds = set()
    inputs: list[Any] = []
    while waiting and seen < MAX_NODES_BETWEEN:
        node, seen = waiting.pop(), seen + 1
        kind = "" if node is None else kind_of(node)
        if kind == "Softmax" or (kind == "Sigmoid" and sigmoids):
            kinds.add(kind)
            inputs.append(parents(node)[0])
        elif kind in ("Cat", "Stack"):
            waiting += parents(node)
        elif kind in RANGE_PRESERVING:
            waiting.append(parents(node)[0])
        else:
            return []
    if waiting or len(kinds) != 1:
        return []
    statistic = "softmax_head" if kinds == {"Softmax"} else "sigmoid_head"
    return [DoubledActivation(statistic, loss, frozenset(chain.from_iterable(map(_parameters_near, inputs))))]


def _parameters_near(node: Any) -> set[int]:
    """`id` of the parameters among the first nodes before `node`, itself included."""
    found: set[int] = set()
    seen: dict[int, Any] = {}
    queue = deque([node])
    while queue and len(seen) < MAX_LAYER_NODES:
        node = queue.popleft()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        if kind_of(node) == LEAF:
            found.add(id(node.variable))
        queue.extend(parents(node))
    return found
