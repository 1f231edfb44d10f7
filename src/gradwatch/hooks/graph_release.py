"""Autograd graphs whose nodes Python has reached are freed in a loop, so that deep ones do not overflow the stack."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

NEXT_NODES = "gradwatch.behind"
"""The key in a node's `metadata` under which the nodes behind it are held."""

LEAF = "AccumulateGrad"
"""The kind of the nodes that put gradients into leaves: they may live as long as these, and nothing is behind them."""

MAX_UNPREPARED = 64
"""Calls of hooked modules, tapped tensors, or nodes of a loss, up to which a graph needs no preparation on any stack:
at eight nodes each they take 150 kB of it, and small stacks have 512 kB. Judgement."""

STACK_OF_NODE = 300
"""Bytes of stack that one node takes at most."""

NODES_OF_CALL = 3
"""Nodes that the hooks on one call of a module reach: what made its output, what that is a view of, and its input."""

SMALLEST_STACK, USUAL_STACK = 2**19, 2**23
"""Bytes of stack of a thread: the least that systems give one, and what the main thread has where nothing limits it."""


def unprepared_calls() -> int:
    """Calls of hooked modules up to which a graph needs no preparation: freed, they take a quarter of the stack of this
    thread.
    """
    if threading.current_thread() is not threading.main_thread():
        size = threading.stack_size() or SMALLEST_STACK
    else:
        limit = SMALLEST_STACK if resource is None else resource.getrlimit(resource.RLIMIT_STACK)[0]
        size = limit if limit > 0 else USUAL_STACK
    return min(size, USUAL_STACK) // 4 // (STACK_OF_NODE * NODES_OF_CALL)


def release_in_a_loop(*nodes: Node | None) -> None:
    """Have `nodes`, and all nodes behind them, freed in a loop whenever their graph is released.

    A node that Python has reached (by `grad_fn`, `next_functions` or a hook on a tensor) has a Python object, which is
    freed with the node and frees the nodes behind it from inside its own destructor. That takes 210 to 300 bytes of
    stack a node: 1,800 in a row overflow a stack of 512 kB (measured on torch 2.13, x86-64). So the `metadata` of each
    node holds the nodes behind it. It is freed after the node's edges, and a loop releases what it holds.

    Takes 2 us for each node not seen before, and 500 bytes while the node lives, in few objects: Python's collector of
    reference cycles goes through all of them.
    """
    waiting = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        behind = [parent for parent, _ in node.next_functions if parent is not None and type(parent).__name__ != LEAF]
        if not behind:
            continue
        notes = metadata_of(node)
        if NEXT_NODES not in notes:
            notes[NEXT_NODES] = _NextNodes(behind[0] if len(behind) == 1 else behind)
            waiting += behind


def metadata_of(node: Node) -> dict[object, Any]:
    """The `metadata` of a node, a dict that lives as long as the node; torch declares this property as a method."""
    return cast("dict[object, Any]", node.metadata)


def made_by(tensors: Iterable[Tensor]) -> Iterator[Node | None]:
    """The nodes that made `tensors`, and those that made the tensors of which they are views."""
    for tensor in tensors:
        yield tensor.grad_fn
        if tensor._base is not None:
            yield tensor._base.grad_fn


class _ReleaseQueue(threading.local):
    """The objects that a thread is about to release."""

    def __init__(self) -> None:
        self.under_way = False
        self.waiting: deque[object] = deque()


class _NextNodes:
    """Holds nodes; its destructor queues them, and the outermost destructor of the thread releases the queue in a loop.

    Nested tuples would do up to Python 3.12, which limits how deep containers are freed inside each other.
    """

    __slots__ = ("nodes",)

    def __init__(self, nodes: object) -> None:
        self.nodes = nodes

    def __del__(self, queue: _ReleaseQueue = _ReleaseQueue()) -> None:  # noqa: B008 (at the end of Python no name is left)
        queue.waiting.append(self.nodes)
        self.nodes = None
        if not queue.under_way:
            queue.under_way = True
            try:
                while queue.waiting:
                    queue.waiting.popleft()
            finally:
                queue.under_way = False
