"""Interventions, one a file: what may be done to gradients before the optimizer uses them. `contract` says what one is.

They run in the order in which they were given, and each sees what the ones before it have made of a gradient.
"""

from gradwatch.interventions.adaptive import AdaptiveClip
from gradwatch.interventions.clip import Clip
from gradwatch.interventions.contract import (
    Action,
    Aim,
    Editing,
    Ending,
    Gate,
    Intervention,
    Memory,
    Refusal,
    Scaling,
    Scope,
    checked,
)
from gradwatch.interventions.scale import Scale, Zero
from gradwatch.interventions.skip import SkipNonFinite
from gradwatch.interventions.spike import SpikeClip
from gradwatch.interventions.stop import Stop

__all__ = [
    "Action",
    "AdaptiveClip",
    "Aim",
    "Clip",
    "Editing",
    "Ending",
    "Gate",
    "Intervention",
    "Memory",
    "Refusal",
    "Scale",
    "Scaling",
    "Scope",
    "SkipNonFinite",
    "SpikeClip",
    "Stop",
    "Zero",
    "checked",
]
