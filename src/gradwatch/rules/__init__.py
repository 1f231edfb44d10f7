"""The rules: each file finds one fault in the history. `default_rules` are those that are on by default.

In all files here, what is called `..._text` is a part of a sentence, `..._remedy` what to change, and `why_...` a cause
and what to change.
"""

from __future__ import annotations

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
from gradwatch.rules.rule import Rule
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


def default_rules() -> tuple[Rule, ...]:
    """A new tuple of every rule. `CONSEQUENCES` says what may follow from what."""
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
