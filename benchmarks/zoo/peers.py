"""What every peer is: a function from a trace to its first complaint of each kind, and the faults a kind stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.zoo.trace import Trace


@dataclass(frozen=True, slots=True)
class Complaint:
    """A rule of a peer fired, for the first time in this training."""

    kind: str
    """The rule, in the peer's words."""
    step: int
    layer: str = ""
    """The layer it names first; "" where it names none."""
    sites: tuple[str, ...] = ()
    """All layers it names at that step."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A system of others, read from its documentation or its source."""

    name: str
    judge: Callable[[Trace], Iterable[Complaint]]
    stands_for: Mapping[str, frozenset[str]]
    """Kind -> the faults for which a complaint of that kind is a right answer; generous on purpose."""
    source: str


class First:
    """Collects complaints and keeps the first of each kind."""

    def __init__(self) -> None:
        self._found: dict[str, Complaint] = {}

    def add(self, kind: str, step: int, layers: Mapping[str, float] | None = None, *, least: bool = False) -> None:
        """`layers` with the number each is accused for: the greatest comes first, or the least."""
        if kind in self._found:
            return
        layers = layers or {}
        ordered = sorted(layers, key=lambda name: layers[name] if least else -layers[name])
        self._found[kind] = Complaint(kind, step, ordered[0] if ordered else "", tuple(ordered))

    def __iter__(self) -> Iterator[Complaint]:
        return iter(self._found.values())


def meaning(**kinds: str) -> dict[str, frozenset[str]]:
    """Kind -> faults, written as words."""
    return {kind: frozenset(faults.split()) for kind, faults in kinds.items()}
