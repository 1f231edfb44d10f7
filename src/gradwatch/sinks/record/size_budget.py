"""How fast the file of a record may grow: what may go into it at a step, and what waits for its turn."""

from __future__ import annotations

from collections.abc import Mapping

BYTES_PER_SITE, BYTES_PER_STEP = 6.0, 150.0
"""What a step may add to the file on average: with 300 layers 1.96 kB, of which 1.43 kB are gradient norms and the
numbers of the whole step (the project's promise: 2 kB)."""

LEAST = 1900.0
"""Bytes that a step of a small model may add too: as much as 300 layers take. A vector of 9 layers takes 100, most of
them not for numbers, and 6 bytes a site would not pay for a second one."""

AHEAD = 50
"""Vectors that may be written before their turn: what is sampled at the start tells most. Judgement."""

PAID_BACK = 250
"""Records after which what was written ahead is made good: a run of 300 steps keeps the promise too. Judgement."""

VECTOR = 60
"""Bytes that a vector takes besides its numbers (measured)."""


class SizeBudget:
    """Counts what was written against what may be."""

    def __init__(self) -> None:
        self._room = 0.0
        self._size = 0.0
        self._written = 0
        self._steps = 0
        self._last: dict[str, int] = {}

    def step(self, sites: int, written: int) -> None:
        """A step begins, of a model of so many `sites`; so far `written` bytes are in the file."""
        self._size = vector(sites)
        income = max(LEAST, BYTES_PER_STEP + BYTES_PER_SITE * sites)
        self._room = min(self._room + income + self._written - written, AHEAD * self._size)
        self._written = written
        self._steps += 1

    def affords(self, size: float) -> bool:
        """Whether so many bytes may be written now."""
        return self._room + self._ahead() >= size

    def chosen(self, due: Mapping[str, float], taken: float) -> list[str]:
        """Which of `due` (statistic -> bytes) are written now, beside `taken` bytes: those that waited longest.

        What is there at every step leaves room for what is sampled now and then and has waited longer.
        """
        found: list[str] = []
        for statistic in sorted(due, key=lambda name: self._last.get(name, 0)):
            last = self._last.get(statistic, 0)
            longer = sum(when < last for name, when in self._last.items() if name not in due)
            taken += due[statistic]
            if not self.affords(taken + longer * self._size):
                break
            self._last[statistic] = self._steps
            found.append(statistic)
        return found

    def _ahead(self) -> float:
        return AHEAD * self._size * max(0.0, 1 - self._steps / PAID_BACK)


def vector(sites: int) -> float:
    """Bytes of a vector with a number for each of `sites`."""
    return 4.0 * sites + VECTOR
