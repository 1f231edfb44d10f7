"""Interventions change gradients before the optimizer uses them, one intervention a file; `contract` defines them.

They run in the order in which they are given, and each receives the gradients as those before it have changed them.
"""

from gradwatch.interventions.adaptive import AdaptiveClip
from gradwatch.interventions.clip import Clip
from gradwatch.interventions.contract import (
    Action,
    ActionState,
    Editing,
    Gate,
    Intervention,
    InterventionSettings,
    ParameterScope,
    Refusal,
    Scaling,
    StopCondition,
    checked,
)
from gradwatch.interventions.scale import Scale, Zero
from gradwatch.interventions.skip import SkipNonFinite
from gradwatch.interventions.spike import SpikeClip
from gradwatch.interventions.stop import Stop

__all__ = [
    "Action",
    "ActionState",
    "AdaptiveClip",
    "Clip",
    "Editing",
    "Gate",
    "Intervention",
    "InterventionSettings",
    "ParameterScope",
    "Refusal",
    "Scale",
    "Scaling",
    "SkipNonFinite",
    "SpikeClip",
    "Stop",
    "StopCondition",
    "Zero",
    "checked",
]
