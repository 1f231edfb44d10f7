"""The order between sites that data flows through: which lies before which, without cycles, as few edges as say it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

Edge = tuple[int, int]
"""Sites: what the first gives out flows into the second. The second is 0 where it flows into the loss."""

Mask = int
"""A set of sites: bit i stands for site i. Of a thousand sites it takes 125 bytes, and one operation."""


class LayerGraph:
    """Edges between sites, and for every site all that lies before it. Takes no edge that would close a cycle."""

    def __init__(self, edges: Iterable[Edge] = ()) -> None:
        self._edges: dict[Edge, None] = {}
        self._above: dict[int, Mask] = {}
        self._inner: Mask = 0
        for before, after in edges:
            self.add(before, after)

    @property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(self._edges)

    def above(self, site: int) -> Mask:
        """All sites before `site`."""
        return self._above.get(site, 0)

    def add(self, before: int, after: int) -> bool:
        """Take the edge, unless `after` lies before `before`: then returns False."""
        if after == 0:
            self._edges[before, 0] = None
            return True
        above = self.above(before)
        if before == after or above >> after & 1:
            return False
        self._edges[before, after] = None
        self._inner |= 1 << before
        more = above | 1 << before
        if more & ~self.above(after):
            self._above[after] = self.above(after) | more
            if self._inner >> after & 1:
                for site, known in self._above.items():
                    if known >> after & 1:
                        self._above[site] = known | more
        return True


def members(mask: Mask) -> Iterator[int]:
    """The sites in `mask`, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def united(known: tuple[Edge, ...] | None, more: tuple[Edge, ...] | None) -> tuple[Edge, ...] | None:
    """`known` with those of `more` that close no cycle; None where neither is known."""
    if more is None or known is more:
        return known
    if known is None:
        return more
    if set(more) <= set(known):
        return known
    return LayerGraph((*known, *more)).edges


def arranged(sites: Sequence[int], edges: Iterable[Edge]) -> tuple[int, ...]:
    """`sites`, each behind all that lie before it, and otherwise in the order given."""
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


def nearest(sites: Sequence[int], edges: Iterable[Edge], kept: Sequence[bool]) -> list[tuple[int, ...]]:
    """For each of `sites` that is `kept`, which of the kept lie next before it, as places among the kept.

    What lies before another of them is left out: around a block with a skip there is no edge. Edges lead through the
    sites that are not kept. `sites` are in an order that `arranged` gives; edges of other sites are left out.
    """
    place = {site: i for i, site in enumerate(sites)}
    before: list[list[int]] = [[] for _ in sites]
    for first, second in edges:
        if second and first in place and second in place:
            before[place[second]].append(place[first])
    # of each site: the kept ones nearest to what it gives out, itself or before it, and all kept ones before those
    fronts: list[tuple[Mask, Mask]] = []
    found: list[tuple[int, ...]] = []
    for i, keep in enumerate(kept):
        front = above = 0
        for j in before[i]:
            front |= fronts[j][0]
            above |= fronts[j][1]
        front &= ~above
        if keep:
            fronts.append((1 << len(found), front | above))
            found.append(tuple(members(front)))
        else:
            fronts.append((front, above))
    return found
