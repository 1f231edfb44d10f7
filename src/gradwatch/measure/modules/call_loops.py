"""Which layers are called in a loop, each call with the output of an earlier one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from gradwatch.hooks.graph_release import metadata_of, release_in_a_loop
from gradwatch.hooks.hook_set import tensors_in
from gradwatch.measure.modules import OutputCallback
from gradwatch.measure.modules.input_hooks import is_hookable

MAX_NODES = 256
"""Nodes of the graph searched for an earlier call of the same layer: a large cell has some tens. Judgement."""

CALL_KEY = "gradwatch.called."
"""Followed by the layer's site, the key in the `metadata` of the nodes that the layer has made."""

MAX_TRIES = 3
"""Samples in which a layer that runs several times is checked for a loop. Judgement."""


@dataclass(slots=True, eq=False)
class CallLoops:
    """Which layers, other than torch's cells, are called in a loop over time."""

    known: set[int] = field(default_factory=set)
    """Sites with a call whose output is an input of a later call."""
    tries: dict[int, int] = field(default_factory=dict)
    """Site of a layer that ran several times in a step -> samples in which it was checked for a loop."""
    calls: dict[int, int] = field(default_factory=dict)
    """Site of such a layer -> its calls in this sample."""
    tried: bool = False
    """Whether a layer was checked in this sample."""


def detect_loop(loops: CallLoops, site: int) -> OutputCallback:
    """Add the layer to `loops.known` when the arguments of a call have been made by an earlier call."""
    key = f"{CALL_KEY}{site}"

    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        calls = loops.calls[site] = loops.calls.get(site, 0) + 1
        if calls == 1:
            loops.tries[site] += 1
            loops.tried = True
        elif calls <= 3 and any(key in metadata_of(node) for node in _nodes_behind(arguments)):
            loops.known.add(site)
        for tensor in tensors if calls < 3 else ():
            if tensor.grad_fn is not None and is_hookable(tensor):
                metadata_of(tensor.grad_fn)[key] = None

    return on_output


def _nodes_behind(arguments: object) -> Iterable[Node]:
    """The nodes that made the tensors in `arguments`, and those before them, nearest first, `MAX_NODES` at most."""
    queue = [tensor.grad_fn for tensor in tensors_in(arguments) if tensor.grad_fn is not None]
    release_in_a_loop(*queue)
    visited = set(queue)
    for node in queue:
        yield node
        for node_behind, _ in node.next_functions:
            if node_behind is not None and node_behind not in visited and len(queue) < MAX_NODES:
                visited.add(node_behind)
                queue.append(node_behind)


def carries_gradient(state: object) -> bool:
    """Whether a gradient flows back through `state`: it holds a tensor that is neither data nor a parameter."""
    return any(not tensor.is_leaf for tensor in tensors_in(state))
