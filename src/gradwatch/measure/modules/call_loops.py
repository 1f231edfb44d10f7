"""Loops: which layers are called again and again, each call on what an earlier one on_output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from gradwatch.hooks.graph_release import metadata_of, release_in_a_loop
from gradwatch.hooks.hook_set import tensors_in
from gradwatch.measure.modules import OutputCallback
from gradwatch.measure.modules.input_hooks import is_hookable

NODES = 256
"""Nodes of the graph looked at for an earlier call of the same layer: a large cell has some tens. Judgement."""

MARK = "gradwatch.called."
"""With the layer's site, the name under which a node of the graph is known again in its `metadata`."""

TRIES = 3
"""Samples in which a layer that runs several times is looked at for a loop. Judgement."""


@dataclass(slots=True, eq=False)
class CallLoops:
    """Which layers, other than torch's cells, are called in a loop through time."""

    known: set[int] = field(default_factory=set)
    """Sites one of whose calls fed the next."""
    tries: dict[int, int] = field(default_factory=dict)
    """Sites that ran several times in a step -> samples in which no call was seen to feed the next."""


def count_calls(loops: CallLoops, site: int) -> OutputCallback:
    calls = 0

    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            loops.tries.setdefault(site, 0)

    return on_output


def look_for_loop(loops: CallLoops, site: int) -> OutputCallback:
    """Find out whether a call of the layer feeds a later one: its mark lies in the graph of that one's arguments."""
    calls, mark = 0, f"{MARK}{site}"

    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            loops.tries[site] += 1
        elif calls <= 3 and any(mark in metadata_of(node) for node in _behind(arguments)):
            loops.known.add(site)
        for tensor in tensors if calls < 3 else ():
            if tensor.grad_fn is not None and is_hookable(tensor):
                metadata_of(tensor.grad_fn)[mark] = None

    return on_output


def _behind(arguments: object) -> Iterable[Node]:
    """The nodes of the graph that led to the tensors among `arguments`, the nearest first, `NODES` at most."""
    queue = [tensor.grad_fn for tensor in tensors_in(arguments) if tensor.grad_fn is not None]
    release_in_a_loop(*queue)
    seen = set(queue)
    for node in queue:
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen and len(queue) < NODES:
                seen.add(before)
                queue.append(before)


def carries(state: object) -> bool:
    """Whether a gradient flows back through the state: it is neither absent, nor data, nor a parameter."""
    return any(not tensor.is_leaf for tensor in tensors_in(state))
