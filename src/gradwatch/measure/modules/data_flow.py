"""The statistic of the data flow: which layers' outputs flow into which layers, read off the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradwatch.core.layer_graph import Edge, LayerGraph, SiteSet, sites_in
from gradwatch.core.record import Layout
from gradwatch.hooks.graph_release import metadata_of, release_in_a_loop
from gradwatch.hooks.hook_set import in_backward
from gradwatch.measure.modules import GradOutputCallback, ModuleStatistic, OutputCallback

NODES = 200_000
"""Nodes of the autograd graph looked at in one step at most, 1 to 2 us each. What has more has a loop over single
numbers in it, not layers. Judgement."""

WALKS = 20
"""Steps at most whose graph is walked, because a layer ran that had not been seen before. Judgement."""

Front = tuple[SiteSet, SiteSet]
"""The layers that what a node gives out comes from, nearest first: those next to it, and all that lie before those."""

NOTHING: Front = (0, 0)


@dataclass(slots=True, eq=False)
class _Walk:
    """What the taps of one sampled step share. It holds no node: what is known of one is written into its `metadata`,
    and goes when the graph goes.
    """

    ancestry: LayerGraph
    placed: set[int]
    """Sites of which it is known what flows into them."""
    left: int
    """Nodes that may still be looked at."""
    fronts: object = field(default_factory=object)
    """The key of a node's front in its metadata; another at each step, should a graph outlive one."""
    owners: object = field(default_factory=object)
    """The key of the layer whose output a node made."""
    over: bool = False
    """Whether a backward pass has begun: what is recomputed there, or runs afterwards, is not walked."""
    unseen: bool = False
    """Whether a layer ran that is not placed."""
    hidden: bool = False
    """Whether layers first showed their graph inside a backward pass, where it ends at their segment."""


class DataFlow(ModuleStatistic):
    """Finds the edges between layers in the graphs of the first steps, and again when further layers run.

    A layer that runs several times keeps the edges of its first call: of later ones those that close no cycle.
    """

    def __init__(self, *, nodes: int = NODES, walks: int = WALKS) -> None:
        """`nodes`: to look at in one step at most; `walks`: steps in which to look, at most."""
        self._nodes, self._most_walks = nodes, walks
        self._ancestry = LayerGraph()
        self._placed: set[int] = set()
        self._walks = 0
        self._due = True
        self._impossible = False
        self._edges: tuple[Edge, ...] | None = None
        self._walk = _Walk(self._ancestry, self._placed, nodes)

    @property
    def edges(self) -> tuple[Edge, ...] | None:
        """The edges found up to the last `collect`; None where layers hide theirs, or none has been seen."""
        return self._edges

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if kind or self._impossible:
            return None
        if self._due:
            return _place(self._walk, site)
        return None if site in self._placed else _notice(self._walk, site)

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        return _end(self._walk) if self._due and not kind and not self._impossible else None

    def on_loss(self, loss: Tensor) -> None:
        # a later pass may be that of another forward, which was not walked
        if self._due and not self._impossible and not self._walk.over and loss.grad_fn is not None:
            _reach(self._walk, loss.grad_fn)
            self._walk.over = True

    def collect(self, layout: Layout) -> None:
        walk = self._walk
        if self._due:
            self._walks += bool(self._placed)
            self._impossible |= walk.hidden or walk.left <= 0
            self._edges = None if self._impossible or not self._placed else self._ancestry.edges
        self._due = not self._placed or (walk.unseen and self._walks < self._most_walks)
        self._walk = _Walk(self._ancestry, self._placed, self._nodes)


def _place(walk: _Walk, site: int) -> OutputCallback:
    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        if walk.left <= 0 or (walk.over and site in walk.placed):
            return
        nodes = list(_nodes(tensors))
        if not nodes:
            return
        if in_backward():
            walk.hidden |= site not in walk.placed
        elif walk.over:
            walk.unseen = True
        else:
            _mark(walk, site, nodes)

    return on_output


def _notice(walk: _Walk, site: int) -> OutputCallback:
    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        if not walk.unseen and any(_nodes(tensors)) and not in_backward():
            walk.unseen = True

    return on_output


def _end(walk: _Walk) -> GradOutputCallback:
    def on_grad_output(gradient: Tensor) -> None:
        walk.over = True

    return on_grad_output


def _nodes(tensors: Iterable[Tensor]) -> Iterator[Node]:
    return (tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)


def _mark(walk: _Walk, site: int, nodes: list[Node]) -> None:
    """The layer `site` has made `nodes`."""
    release_in_a_loop(*nodes)
    front = above = 0
    for node in nodes:
        near, far = _front(walk, node)
        front |= near
        above |= far
    front &= ~above
    for before in sites_in(front):
        walk.ancestry.add(before, site)
    above |= walk.ancestry.ancestors(site)
    # a layer that runs again behind itself adds nothing: what follows lies behind what came between
    made = (front | 1 << site) & ~above, above
    for node in nodes:
        marks = metadata_of(node)
        marks[walk.fronts] = made
        marks[walk.owners] = site
    walk.placed.add(site)


def _front(walk: _Walk, node: Node) -> Front:
    """The front of `node`; each node of the graph is looked at once, in this call or an earlier one of the step."""
    key, stack = walk.fronts, [node]
    while stack:
        top = stack[-1]
        marks = metadata_of(top)
        if key in marks or walk.left <= 0:
            stack.pop()
            continue
        merged, waiting = NOTHING, len(stack)
        for parent, _ in top.next_functions:
            # a leaf's node may live as long as its parameter: nothing is written there
            if parent is None or not parent.next_functions:
                continue
            found = metadata_of(parent).get(key)
            if found is None:
                stack.append(parent)
            elif merged is NOTHING:
                merged = found
            elif found is not merged:
                above = merged[1] | found[1]
                merged = (merged[0] | found[0]) & ~above, above
        if len(stack) == waiting:
            marks[key] = merged
            walk.left -= 1
            stack.pop()
    front: Front = metadata_of(node).get(key, NOTHING)
    return front


def _reach(walk: _Walk, loss: Node) -> None:
    """Edges to the loss, 0, from the layers whose outputs flow into it past all other layers."""
    release_in_a_loop(loss)
    seen, stack = object(), [loss]
    while stack and walk.left > 0:
        node = stack.pop()
        marks = metadata_of(node)
        if seen in marks:
            continue
        marks[seen] = None
        walk.left -= 1
        owner = marks.get(walk.owners)
        if owner is not None:
            walk.ancestry.add(owner, 0)
        else:
            stack += [parent for parent, _ in node.next_functions if parent is not None and parent.next_functions]
