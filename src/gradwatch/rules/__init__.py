"""Rules: one fault a file. The contract, and the rules that are on by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradwatch.core.alert import Finding
from gradwatch.core.history import History
from gradwatch.rules.act_blowup import ActBlowup
from gradwatch.rules.bad_head import BadHead
from gradwatch.rules.collapse import Collapse
from gradwatch.rules.dead import Dead
from gradwatch.rules.disconnected import Disconnected
from gradwatch.rules.divergence import Divergence
from gradwatch.rules.exploding import Exploding
from gradwatch.rules.frozen import Frozen
from gradwatch.rules.input_scale import InputScale
from gradwatch.rules.nonfinite import Nonfinite
from gradwatch.rules.saturation import Saturation
from gradwatch.rules.spike import Spike
from gradwatch.rules.stale_grad import StaleGrad
from gradwatch.rules.stalled import Stalled
from gradwatch.rules.tampered import Tampered
from gradwatch.rules.underflow import Underflow
from gradwatch.rules.vanishing import Vanishing

__all__ = [
    "ActBlowup",
    "BadHead",
    "Collapse",
    "Dead",
    "Disconnected",
    "Divergence",
    "Exploding",
    "Frozen",
    "InputScale",
    "Nonfinite",
    "Rule",
    "Saturation",
    "Spike",
    "StaleGrad",
    "Stalled",
    "Tampered",
    "Underflow",
    "Vanishing",
    "default_rules",
]


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


def default_rules() -> tuple[Rule, ...]:
    """Every rule, causes before what follows from them: the latch knows an open cause when its consequence comes."""
    return (
        StaleGrad(),
        Nonfinite(),
        Underflow(),
        Tampered(),
        BadHead(),
        InputScale(),
        Divergence(),
        ActBlowup(),
        Collapse(),
        Saturation(),
        Dead(),
        Disconnected(),
        Frozen(),
        Stalled(),
        Exploding(),
        Vanishing(),
        Spike(),
    )
