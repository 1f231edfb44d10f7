"""GradWatch: one line tells you which layers' gradients vanish, explode, die or turn non-finite.

The public names are loaded when they are first used: `import gradwatch` imports neither torch nor lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwatch.alert import Alert, Finding, Severity, Verdict
    from gradwatch.callback import GradWatch
    from gradwatch.history import History
    from gradwatch.interventions.adaptive import AdaptiveClip
    from gradwatch.interventions.clip import Clip
    from gradwatch.interventions.scale import Scale, Zero
    from gradwatch.interventions.skip import SkipNonFinite
    from gradwatch.interventions.spike import SpikeClip
    from gradwatch.interventions.stop import Stop
    from gradwatch.record import Record
    from gradwatch.rules import default_rules
    from gradwatch.toolbox.backward import backward_hook
    from gradwatch.toolbox.capture import capture
    from gradwatch.toolbox.edit import edit
    from gradwatch.toolbox.gradcam import gradcam, overlay
    from gradwatch.watch import Watch

__version__ = "0.1.0"

_HOMES = {
    "AdaptiveClip": "interventions.adaptive",
    "Alert": "alert",
    "Clip": "interventions.clip",
    "Finding": "alert",
    "GradWatch": "callback",
    "History": "history",
    "Record": "record",
    "Scale": "interventions.scale",
    "Severity": "alert",
    "SkipNonFinite": "interventions.skip",
    "SpikeClip": "interventions.spike",
    "Stop": "interventions.stop",
    "Verdict": "alert",
    "Watch": "watch",
    "Zero": "interventions.scale",
    "backward_hook": "toolbox.backward",
    "capture": "toolbox.capture",
    "default_rules": "rules",
    "edit": "toolbox.edit",
    "gradcam": "toolbox.gradcam",
    "overlay": "toolbox.gradcam",
}

__all__ = [
    "AdaptiveClip",
    "Alert",
    "Clip",
    "Finding",
    "GradWatch",
    "History",
    "Record",
    "Scale",
    "Severity",
    "SkipNonFinite",
    "SpikeClip",
    "Stop",
    "Verdict",
    "Watch",
    "Zero",
    "backward_hook",
    "capture",
    "default_rules",
    "edit",
    "gradcam",
    "overlay",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradwatch' has no attribute {name!r}")
    value = getattr(import_module(f"gradwatch.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
