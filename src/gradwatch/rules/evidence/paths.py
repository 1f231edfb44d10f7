"""Paths from the input to the loss: which of some layers lie upstream and downstream of which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.layer_graph import nearest_predecessors
from gradwatch.core.record import Floats, Layout, Mask
from gradwatch.rules.evidence.samples import forward_order

Positions = tuple[int, ...]

NO_LAYER = -np.inf
"""The strength where there is no layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The data flow between some layers, numbered in forward order. Strengths have shape [layers].

    Where the flow is not known, the layers count as one chain.
    """

    before: tuple[Positions, ...]
    """The layers next before each one."""
    after: tuple[Positions, ...]
    """The layers next behind each one."""
    starts: Mask
    """The layers without a layer before them."""
    ends: Mask
    """The layers whose output reaches the loss through no other layer; they may have layers behind them, too."""
    depth: int
    """Number of layers on the longest path."""

    def __len__(self) -> int:
        return len(self.before)

    def upstream(self, strengths: Floats) -> Floats:
        """The highest strength of each layer and all layers before it."""
        found = strengths.tolist()
        for i, before in enumerate(self.before):
            found[i] = max([found[i], *(found[j] for j in before)])
        return np.array(found)

    def downstream(self, strengths: Floats) -> tuple[Floats, NDArray[np.intp]]:
        """The highest strength behind each layer, `NO_LAYER` where none is, and the nearest layer that has it."""
        own = strengths.tolist()
        most, place = [NO_LAYER] * len(own), list(range(len(own)))
        for i in range(len(own) - 1, -1, -1):
            for j in self.after[i]:
                best, where = (own[j], j) if own[j] >= most[j] else (most[j], place[j])
                if best > most[i]:
                    most[i], place[i] = best, where
        return np.array(most), np.array(place, dtype=np.intp)

    def above(self, layers: Mask) -> Mask:
        """Which layers lie before one of `layers`."""
        found = [False] * len(self)
        chosen = layers.tolist()
        for i in range(len(self) - 1, -1, -1):
            found[i] = any(chosen[j] or found[j] for j in self.after[i])
        return np.array(found, dtype=bool)

    def below(self, layers: Mask) -> Mask:
        """Which layers lie behind one of `layers`."""
        found = [False] * len(self)
        chosen = layers.tolist()
        for i, before in enumerate(self.before):
            found[i] = any(chosen[j] or found[j] for j in before)
        return np.array(found, dtype=bool)

    def only_through(self, layers: Mask) -> Mask:
        """Which layers reach the loss through some of `layers` alone, these included."""
        found = layers.tolist()
        for i in range(len(self) - 1, -1, -1):
            found[i] |= not self.ends[i] and all(found[j] for j in self.after[i])
        return np.array(found, dtype=bool)

    def branches(self, least: int) -> list[NDArray[np.intp]]:
        """The branches: for each start, the layers that only it flows into, if there are `least` of them.

        Empty where there is only one start.
        """
        starts = np.flatnonzero(self.starts).tolist()
        origins = [-1] * len(self)
        for i, before in enumerate(self.before):
            found = {origins[j] for j in before}
            origins[i] = i if not before else found.pop() if len(found) == 1 else -1
        own = np.array(origins, dtype=np.intp)
        sizes = np.bincount(own[own >= 0])
        return [np.flatnonzero(own == i) for i in starts if sizes[i] >= least] if len(starts) > 1 else []

    def near_loss(self, layers: int) -> Mask:
        """Which layers have fewer than `layers` layers between themselves and the loss."""
        away = [0] * len(self)
        for i in range(len(self) - 1, -1, -1):
            away[i] = 0 if self.ends[i] else 1 + min(away[j] for j in self.after[i])
        return np.array(away) < layers

    def agreed(self, strengths: Floats, layers: int) -> Floats:
        """The lowest strength of each layer and those after it, `layers` in all, along the strongest path."""
        found = own = strengths.tolist()
        for _ in range(layers - 1):
            found = [
                min(own[i], max(found[j] for j in after)) if after else own[i] for i, after in enumerate(self.after)
            ]
        return np.array(found)

    def way(self, first: int, goal: int, strengths: Floats) -> list[int]:
        """A path from `first` to `goal`, which lies behind it, through the strongest of the layers at every fork."""
        target = np.zeros(len(self), dtype=bool)
        target[goal] = True
        towards = self.above(target) | target
        path = [first]
        while path[-1] != goal:
            path.append(max((j for j in self.after[path[-1]] if towards[j]), key=lambda j: float(strengths[j])))
        return path


def paths(layout: Layout, sites: NDArray[np.intp]) -> Paths:
    """The flow between the layers `sites`, which are in the order that `forward_order` gives."""
    return _paths(layout, sites.tobytes())


@lru_cache(maxsize=32)
def _paths(layout: Layout, chosen: bytes) -> Paths:
    sites = np.frombuffer(chosen, dtype=np.intp)
    if layout.edges is None:
        before: Sequence[Positions] = [(i - 1,) if i else () for i in range(len(sites))]
        reached = frozenset[int]()
    else:
        order = forward_order(layout)
        kept = np.isin(order, sites)
        before = nearest_predecessors(order.tolist(), layout.edges, kept.tolist())
        reached = reaching_loss(layout, frozenset(sites.tolist()))
    after: list[list[int]] = [[] for _ in sites]
    length = [1] * len(sites)
    for i, places in enumerate(before):
        for j in places:
            after[j].append(i)
            length[i] = max(length[i], 1 + length[j])
    starts = np.array([not places for places in before], dtype=bool)
    ends = np.array([not after[i] or site in reached for i, site in enumerate(sites.tolist())], dtype=bool)
    return Paths(tuple(before), tuple(map(tuple, after)), starts, ends, max(length, default=0))


@lru_cache(maxsize=8)
def reaching_loss(layout: Layout, others: frozenset[int] = frozenset()) -> frozenset[int]:
    """The layers of whose output the loss is made, through none of `others`; only where the flow is known."""
    assert layout.edges is not None
    before: dict[int, list[int]] = {}
    for first, second in layout.edges:
        before.setdefault(second, []).append(first)
    reached, stack = set[int](), list(before.get(0, ()))
    while stack:
        site = stack.pop()
        if site not in reached:
            reached.add(site)
            stack += [] if site in others else before.get(site, ())
    return frozenset(reached)
