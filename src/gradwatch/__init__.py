"""GradWatch: one line tells you which layers' gradients vanish, explode, die or turn non-finite.

The public names are loaded when they are first used: `import gradwatch` imports neither torch nor lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwatch.core.alert import Alert, Finding, Severity, Verdict
    from gradwatch.core.history import History
    from gradwatch.core.record import Record
    from gradwatch.defaults import default_sinks
    from gradwatch.interventions.adaptive import AdaptiveClip
    from gradwatch.interventions.clip import Clip
    from gradwatch.interventions.scale import Scale, Zero
    from gradwatch.interventions.skip import SkipNonFinite
    from gradwatch.interventions.spike import SpikeClip
    from gradwatch.interventions.stop import Stop
    from gradwatch.lightning.callback import GradWatch
    from gradwatch.lightning.feature_maps import FeatureMaps
    from gradwatch.rules import default_rules
    from gradwatch.runs.arrays import load_run
    from gradwatch.sinks.flight_recorder import FlightRecorder
    from gradwatch.toolbox.backward import backward_hook
    from gradwatch.toolbox.capture import capture
    from gradwatch.toolbox.edit import edit
    from gradwatch.toolbox.gradcam import gradcam, overlay
    from gradwatch.toolbox.incident import load_incident
    from gradwatch.toolbox.tap import tap
    from gradwatch.watch import Watch

__version__ = "0.2.0"

_HOMES = {
    "AdaptiveClip": "interventions.adaptive",
    "Alert": "core.alert",
    "Clip": "interventions.clip",
    "FeatureMaps": "lightning.feature_maps",
    "Finding": "core.alert",
    "FlightRecorder": "sinks.flight_recorder",
    "GradWatch": "lightning.callback",
    "History": "core.history",
    "Record": "core.record",
    "Scale": "interventions.scale",
    "Severity": "core.alert",
    "SkipNonFinite": "interventions.skip",
    "SpikeClip": "interventions.spike",
    "Stop": "interventions.stop",
    "Verdict": "core.alert",
    "Watch": "watch",
    "Zero": "interventions.scale",
    "backward_hook": "toolbox.backward",
    "capture": "toolbox.capture",
    "default_rules": "rules",
    "default_sinks": "defaults",
    "edit": "toolbox.edit",
    "gradcam": "toolbox.gradcam",
    "load_incident": "toolbox.incident",
    "load_run": "runs.arrays",
    "overlay": "toolbox.gradcam",
    "tap": "toolbox.tap",
}

__all__ = [
    "AdaptiveClip",
    "Alert",
    "Clip",
    "FeatureMaps",
    "Finding",
    "FlightRecorder",
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
    "default_sinks",
    "edit",
    "gradcam",
    "load_incident",
    "load_run",
    "overlay",
    "tap",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradwatch' has no attribute {name!r}")
    value = getattr(import_module(f"gradwatch.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
