"""Whether a backward pass is that of the loss, which hooks on parameters, activations and taps ask."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gradwatch.hooks.graph_release import LEAF
from gradwatch.hooks.hook_set import backward_pass

MAX_NODES = 64
"""Nodes of the graph that are looked at for a leaf near a hook: each layer has one within a few."""


class LossPass:
    """Distinguishes the backward pass of the loss from those that a training step runs before it, to compute the loss:
    for a gradient penalty, or an adversarial example. What flows back in these is not counted.

    Where the loop announces the pass of the loss, as Lightning does in automatic optimization, none before it counts.
    Elsewhere, one that reaches no parameter does not: `torch.autograd.grad` of an input.
    """

    def __init__(self, model: nn.Module, *, announced: bool = False) -> None:
        """`announced`: whether the loop says when it begins."""
        self.announced = announced
        self.begun = True
        """Whether it has begun in this batch; where the loop does not say, it always has."""
        self._model = weakref.ref(model)
        self._latest = -1, True
        """The number of a backward pass that was not announced, and whether it counts."""

    def counts(self) -> bool:
        """Whether what flows back now is of the loss. To be asked in a hook."""
        if self.announced or not self.begun:
            return self.begun
        latest, counts = self._latest
        if (number := backward_pass()) != latest:
            counts = self._reaches_parameters()
            self._latest = number, counts  # in one: autograd has a thread for each device
        return counts

    def _reaches_parameters(self) -> bool:
        """Whether this backward pass arrives at a parameter.

        Where one for all leaves runs, it arrives at those behind the node that is running. A leaf there that it leaves
        out tells that it is for certain inputs; only then the model's own parameters are asked, of which sharded
        models, and those in torch.func, compute with others.
        """
        node, model = torch._C._current_autograd_node(), self._model()
        if node is None or model is None or (leaf := _leaf_behind(node)) is None or _is_reached(leaf):
            return True
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        return any(_is_reached(get_gradient_edge(parameter).node) for parameter in trained)


def _leaf_behind(node: Any) -> Any:
    """The nearest leaf that the gradient of `node` is passed on to; None if none is near."""
    ahead = deque([node])
    for _ in range(MAX_NODES):
        if not ahead:
            break
        node = ahead.popleft()
        if node.name().endswith(LEAF):
            return node
        ahead.extend(parent for parent, _ in node.next_functions if parent is not None)
    return None


def _is_reached(leaf: Any) -> bool:
    """Whether the backward pass that is running arrives at `leaf`."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad of this leaf
        return True
