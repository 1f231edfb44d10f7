"""Interventions, one a file: what may be done to gradients before the optimizer uses them. `contract` says what one is.

They run in the order in which they were given, and each sees what the ones before it have made of a gradient.
"""

from gradwatch.interventions.clip import Clip
from gradwatch.interventions.contract import Action, Aim, Editing, Gate, Intervention, Memory, Scaling, Scope, checked
from gradwatch.interventions.scale import Scale, Zero

__all__ = [
    "Action",
    "Aim",
    "Clip",
    "Editing",
    "Gate",
    "Intervention",
    "Memory",
    "Scale",
    "Scaling",
    "Scope",
    "Zero",
    "checked",
]
