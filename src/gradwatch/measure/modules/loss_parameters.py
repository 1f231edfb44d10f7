"""Parameters that the loss depends on: those of the model, and those that no module of the model owns."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gradwatch.core.record import clean_name
from gradwatch.hooks.graph_release import LEAF, MAX_UNPREPARED, release_in_a_loop
from gradwatch.measure.modules.autograd_graph import kind_of, parents

MAX_NODES = 20_000
"""Nodes of a graph that are visited, 1 us each. Judgement: a transformer of 24 layers has 2,000."""

LOOKS = 4
"""Sampled steps whose graph is walked: those that a run begins with. A parameter is unowned if it is in all of them and
has not changed from the first to the last. Judgement: an optimizer that steps has changed it by then."""

MAX_DEPTH = 3
"""Containers inside containers that are searched for the name of such a parameter. Judgement."""


class LossParameters:
    """Walks the graphs of the first sampled steps from the loss to its leaves; keeps weak references only.

    A copy of a model that is made anew at each step, as in meta-learning, is not unowned; nor is a parameter that an
    optimizer changes of which GradWatch does not know, nor one of a module in evaluation mode, such as the network of a
    perceptual loss.
    """

    def __init__(self) -> None:
        self.owned: frozenset[str] = frozenset()
        """Names of the model's parameters in the graph of the first sampled step."""
        self.unowned: tuple[str, ...] = ()
        """Layers of parameters that no module owns and no optimizer changes, by where they were found,
        "net.hidden[0]", or else the shapes of these: in model order.
        """
        self._looks = 0
        self._versions: dict[int, tuple[weakref.ref[nn.Parameter], int]] = {}

    def look(self, loss: Tensor, model: nn.Module) -> None:
        """A backward pass begins at `loss`, or has ended; its graph still exists."""
        if self._looks >= LOOKS or loss.grad_fn is None:
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        leaves = {id(leaf): leaf for leaf in _leaves(loss.grad_fn)}
        there = {key: leaf for key, leaf in leaves.items() if key not in names}
        if not self._looks:
            self.owned = frozenset(clean_name(names[key]) for key in leaves if key in names)
            # `_version` is not a public name of torch: tests/measure/test_loss_parameters.py fails if it moves
            self._versions = {key: (weakref.ref(leaf), leaf._version) for key, leaf in there.items()}
        kept = {}
        for key, (reference, version) in self._versions.items():
            leaf = reference()
            if leaf is not None and there.get(key) is leaf and leaf._version == version:
                kept[key] = reference, version
        self._versions, self._looks = kept, self._looks + 1
        if self._looks == LOOKS or not kept:
            self._looks = LOOKS
            found = [leaf for reference, _ in kept.values() if (leaf := reference()) is not None]
            self.unowned = _names(found, model) if found else ()
            self._versions = {}


def _leaves(node: Any) -> Iterator[nn.Parameter]:
    """The parameters at which the graph ends."""
    seen: dict[int, Any] = {}
    stack = [node]
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        if len(seen) == MAX_UNPREPARED:
            release_in_a_loop(node)
        if kind_of(node) == LEAF:
            if isinstance(node.variable, nn.Parameter):
                yield node.variable
        else:
            stack += parents(node)


def _names(found: Iterable[nn.Parameter], model: nn.Module) -> tuple[str, ...]:
    owners: dict[int, tuple[str, bool]] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                _search(value, f"{name}.{attribute}" if name else attribute, owners, MAX_DEPTH)
    leaves = {id(leaf): leaf for leaf in found}
    names = [name for key, (name, training) in owners.items() if key in leaves and training]
    names += [f"parameter {list(leaf.shape)}" for key, leaf in leaves.items() if key not in owners]
    return tuple(dict.fromkeys(names))


def _search(value: object, name: str, owners: dict[int, tuple[str, bool]], depth: int) -> None:
    """Enter the parameters in `value` by `id`: the name of their layer, and whether that is in training mode."""
    if isinstance(value, nn.Parameter):
        owners.setdefault(id(value), (name, True))
    elif isinstance(value, nn.Module):
        for inner, module in value.named_modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), (f"{name}.{inner}" if inner else name, module.training))
    elif depth and isinstance(value, Mapping):
        for key, each in value.items():
            _search(each, f"{name}[{key!r}]", owners, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _search(each, f"{name}[{number}]", owners, depth - 1)
