"""Rules: one fault a file. The contract, and the rules that are on by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradwatch.alert import Finding
from gradwatch.record import History


class Rule(Protocol):
    """A pure function of the history that finds one fault. It sees numbers, never tensors."""

    @property
    def name(self) -> str:
        """The fault, as it is printed."""

    @property
    def needs(self) -> frozenset[str]:
        """The statistics it reads; the engine computes the union over all rules, and no more."""

    def __call__(self, history: History) -> Sequence[Finding] | None:
        """Findings at the latest record, worst first; [] where all is well; None where this record cannot tell."""
