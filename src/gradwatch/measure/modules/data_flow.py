"""The edges of the layer graph: which layers' outputs flow into which layers, as the autograd graph shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradwatch.core.layer_graph import Edge, LayerGraph, SiteSet, sites_in
from gradwatch.core.record import Layout
from gradwatch.hooks.graph_release import metadata_of, release_in_a_loop
from gradwatch.hooks.hook_set import in_backward
from gradwatch.measure.modules import GradOutputCallback, ModuleStatistic, OutputCallback

MAX_NODES = 200_000
"""Nodes of the autograd graph visited in one step at most, 1 to 2 us each. A graph with more has a loop over single
numbers in it, not layers. Judgement."""

MAX_WALKS = 20
"""Steps at most whose graph is walked because a layer ran for the first time. Judgement."""

LayersBefore = tuple[SiteSet, SiteSet]
"""The layers that a node's output comes from: the nearest ones, and all that lie before those."""

NO_LAYERS: LayersBefore = (0, 0)


@dataclass(slots=True, eq=False)
class _GraphWalk:
    """The state that the hooks of one sampled step share. It holds no node: what is known of a node is written into its
    `metadata`, and freed with the graph.
    """

    nodes_left: int = field(default_factory=lambda: MAX_NODES)
    """Nodes that may still be visited."""
    layers_before_key: object = field(default_factory=object)
    """The key of a node's `LayersBefore` in its metadata; a new one at each step, as a graph may outlive a step."""
    site_key: object = field(default_factory=object)
    """The key in a node's metadata of the layer whose output the node made."""
    backward_begun: bool = False
    """Whether a backward pass has begun: graphs made during it or afterwards are not walked."""
    loss_known: bool = False
    """Whether the edges to a loss are known."""
    new_layer_ran: bool = False
    """Whether a layer ran whose incoming edges are unknown."""
    ran_in_backward: bool = False
    """Whether layers first ran with gradients inside a backward pass (a checkpoint), where the graph ends at their
    segment."""


class DataFlow(ModuleStatistic):
    """Finds the edges between layers in the graphs of the first steps, and again when further layers run.

    A layer that runs several times keeps the edges of its first call, and those of later calls that close no cycle.
    """

    def __init__(self) -> None:
        self._graph = LayerGraph()
        self._traced: set[int] = set()
        """Sites whose incoming edges are known."""
        self._number_traced = 0
        """How many of them there were at the last `collect`."""
        self._walks = 0
        self._due = True
        self._unknowable = False
        self.edges: tuple[Edge, ...] | None = None
        """Those found up to the last `collect`; None where they cannot be found, or no layer has run."""
        self.walk = _GraphWalk()

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if kind or self._unknowable:
            return None
        if self._due:
            return partial(self._trace, site)
        return None if site in self._traced else self._notice

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        return self._on_backward if self._due and not kind and not self._unknowable else None

    def on_loss(self, loss: Tensor) -> None:
        # a later pass may be that of another forward, which was not walked
        if self._due and not self._unknowable and not self.walk.loss_known and loss.grad_fn is not None:
            self._add_edges_to_loss(loss.grad_fn)
            self.walk.backward_begun = self.walk.loss_known = True

    def collect(self, layout: Layout) -> None:
        walk, due, unknowable, traced = self.walk, self._due, self._unknowable, self._number_traced
        if self._due:
            self._walks += bool(self._traced)
            self._unknowable |= walk.ran_in_backward or walk.nodes_left <= 0
            self.edges = None if self._unknowable or not self._traced else self._graph.edges
        self._due = not self._traced or (walk.new_layer_ran and self._walks < MAX_WALKS)
        self._number_traced = len(self._traced)
        if (due, unknowable, traced) != (self._due, self._unknowable, self._number_traced):
            self.version += 1
        self.walk = _GraphWalk()

    def _trace(self, site: int, arguments: object, tensors: Iterable[Tensor]) -> None:
        """The layer `site` has run."""
        walk = self.walk
        if walk.nodes_left <= 0 or (walk.backward_begun and site in self._traced):
            return
        nodes = list(_nodes(tensors))
        if not nodes:
            return
        if in_backward():
            walk.ran_in_backward |= site not in self._traced
        elif walk.backward_begun:
            walk.new_layer_ran = True
        else:
            self._add_edges_to_layer(site, nodes)

    def _notice(self, arguments: object, tensors: Iterable[Tensor]) -> None:
        """A layer has run whose edges are unknown."""
        if any(_nodes(tensors)) and not in_backward():
            self.walk.new_layer_ran = True

    def _on_backward(self, gradient: Tensor) -> None:
        self.walk.backward_begun = True

    def _add_edges_to_layer(self, site: int, nodes: list[Node]) -> None:
        """Add the edges to the layer `site`, whose outputs `nodes` made."""
        release_in_a_loop(*nodes)
        front = above = 0
        for node in nodes:
            near, far = _layers_before(self.walk, node)
            front |= near
            above |= far
        front &= ~above
        for before in sites_in(front):
            self._graph.add(before, site)
        above |= self._graph.ancestors(site)
        # a layer that runs again after itself is left out: its own later layers are already before the node
        made = (front | 1 << site) & ~above, above
        for node in nodes:
            marks = metadata_of(node)
            marks[self.walk.layers_before_key] = made
            marks[self.walk.site_key] = site
        self._traced.add(site)

    def _add_edges_to_loss(self, loss: Node) -> None:
        """Add edges to the loss, site 0, from the layers whose outputs flow into it through no other layer."""
        release_in_a_loop(loss)
        walk, seen, stack = self.walk, object(), [loss]
        while stack and walk.nodes_left > 0:
            node = stack.pop()
            marks = metadata_of(node)
            if seen in marks:
                continue
            marks[seen] = None
            walk.nodes_left -= 1
            owner = marks.get(walk.site_key)
            if owner is not None:
                self._graph.add(owner, 0)
            else:
                stack += [parent for parent, _ in node.next_functions if parent is not None and parent.next_functions]


def _nodes(tensors: Iterable[Tensor]) -> Iterator[Node]:
    return (tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)


def _layers_before(walk: _GraphWalk, node: Node) -> LayersBefore:
    """The layers before `node`; each node of the graph is visited once, in this call or an earlier one of the step."""
    key, stack = walk.layers_before_key, [node]
    while stack:
        top = stack[-1]
        marks = metadata_of(top)
        if key in marks or walk.nodes_left <= 0:
            stack.pop()
            continue
        merged, waiting = NO_LAYERS, len(stack)
        for parent, _ in top.next_functions:
            # a leaf's node may live as long as its parameter: its metadata is not written
            if parent is None or not parent.next_functions:
                continue
            found = metadata_of(parent).get(key)
            if found is None:
                stack.append(parent)
            elif merged is NO_LAYERS:
                merged = found
            elif found is not merged:
                above = merged[1] | found[1]
                merged = (merged[0] | found[0]) & ~above, above
        if len(stack) == waiting:
            marks[key] = merged
            walk.nodes_left -= 1
            stack.pop()
    front: LayersBefore = metadata_of(node).get(key, NO_LAYERS)
    return front
