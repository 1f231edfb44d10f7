"""The graph of the data flow between layers: which layers' outputs reach which layers. It has no cycles."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

Edge = tuple[int, int]
"""Two site indices: the output of the first flows into the second. The second is 0 for the loss."""

SiteSet = int
"""A set of site indices as the bits of an integer: bit i is site i. A union is one operation."""


class LayerGraph:
    """Edges between sites, and the ancestors of each site. An edge that would close a cycle is refused."""

    def __init__(self, edges: Iterable[Edge] = ()) -> None:
        self._edges: dict[Edge, None] = {}
        self._ancestors: dict[int, SiteSet] = {}
        self._inner: SiteSet = 0
        for before, after in edges:
            self.add(before, after)

    @property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(self._edges)

    def ancestors(self, site: int) -> SiteSet:
        """All sites whose output reaches `site`."""
        return self._ancestors.get(site, 0)

    def add(self, before: int, after: int) -> bool:
        """Add the edge and return True; return False, and add nothing, if it would close a cycle."""
        if after == 0:
            self._edges[before, 0] = None
            return True
        earlier = self.ancestors(before)
        if before == after or earlier >> after & 1:
            return False
        self._edges[before, after] = None
        self._inner |= 1 << before
        more = earlier | 1 << before
        if more & ~self.ancestors(after):
            self._ancestors[after] = self.ancestors(after) | more
            if self._inner >> after & 1:
                for site, known in self._ancestors.items():
                    if known >> after & 1:
                        self._ancestors[site] = known | more
        return True


def sites_in(sites: SiteSet) -> Iterator[int]:
    """The indices in `sites`, ascending."""
    while sites:
        lowest = sites & -sites
        yield lowest.bit_length() - 1
        sites ^= lowest


def merge_edges(known: tuple[Edge, ...] | None, more: tuple[Edge, ...] | None) -> tuple[Edge, ...] | None:
    """`known`, then those of `more` that close no cycle; None where neither is known."""
    if more is None:
        return known
    if known is None:
        return more
    if set(more) <= set(known):
        return known
    return LayerGraph((*known, *more)).edges


def topological_order(sites: Sequence[int], edges: Iterable[Edge]) -> tuple[int, ...]:
    """`sites` in an order in which each comes after its ancestors; otherwise the given order is kept."""
    place = {site: i for i, site in enumerate(sites)}
    known = [(place[b], place[a]) for b, a in edges if a and b in place and a in place]
    if all(before < after for before, after in known):
        return tuple(sites)
    behind: list[list[int]] = [[] for _ in sites]
    waits = [0] * len(sites)
    for before, after in known:
        behind[before].append(after)
        waits[after] += 1
    free = [i for i, count in enumerate(waits) if not count]
    found = []
    while free:
        first = heapq.heappop(free)
        found.append(sites[first])
        for after in behind[first]:
            waits[after] -= 1
            if not waits[after]:
                heapq.heappush(free, after)
    assert len(found) == len(place), "the edges have no cycle"
    return tuple(found)


def nearest_predecessors(sites: Sequence[int], edges: Iterable[Edge], kept: Sequence[bool]) -> list[tuple[int, ...]]:
    """The nearest kept ancestors of each of `sites` that is `kept`, as positions among the kept.

    An ancestor of another such ancestor is left out: a skip connection around a block adds no edge. Edges lead through
    the sites that are not kept. `sites` are in topological order; edges of other sites do not count.
    """
    place = {site: i for i, site in enumerate(sites)}
    before: list[list[int]] = [[] for _ in sites]
    for first, second in edges:
        if second and first in place and second in place:
            before[place[second]].append(place[first])
    # of each site: the kept sites nearest to its output (itself, or ancestors), and the kept ancestors of those
    fronts: list[tuple[SiteSet, SiteSet]] = []
    found: list[tuple[int, ...]] = []
    for i, keep in enumerate(kept):
        front = ancestors = 0
        for j in before[i]:
            front |= fronts[j][0]
            ancestors |= fronts[j][1]
        front &= ~ancestors
        if keep:
            fronts.append((1 << len(found), front | ancestors))
            found.append(tuple(sites_in(front)))
        else:
            fronts.append((front, ancestors))
    return found
