"""GradWatch: one line tells you which layers' gradients vanish, explode, die or turn non-finite.

The public names are loaded when they are first used: `import gradwatch` imports neither torch nor lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwatch.alert import Alert, Finding, Severity, Verdict
    from gradwatch.callback import GradWatch
    from gradwatch.defaults import default_sinks
    from gradwatch.feature_maps import FeatureMaps
    from gradwatch.history import History
    from gradwatch.record import Record
    from gradwatch.rules import default_rules
    from gradwatch.toolbox.backward import backward_hook
    from gradwatch.toolbox.capture import capture
    from gradwatch.toolbox.edit import edit
    from gradwatch.toolbox.gradcam import gradcam, overlay
    from gradwatch.toolbox.tap import tap
    from gradwatch.watch import Watch

__version__ = "0.1.0"

_HOMES = {
    "Alert": "alert",
    "FeatureMaps": "feature_maps",
    "Finding": "alert",
    "GradWatch": "callback",
    "History": "history",
    "Record": "record",
    "Severity": "alert",
    "Verdict": "alert",
    "Watch": "watch",
    "backward_hook": "toolbox.backward",
    "capture": "toolbox.capture",
    "default_rules": "rules",
    "default_sinks": "defaults",
    "edit": "toolbox.edit",
    "gradcam": "toolbox.gradcam",
    "overlay": "toolbox.gradcam",
    "tap": "toolbox.tap",
}

__all__ = [
    "Alert",
    "FeatureMaps",
    "Finding",
    "GradWatch",
    "History",
    "Record",
    "Severity",
    "Verdict",
    "Watch",
    "backward_hook",
    "capture",
    "default_rules",
    "default_sinks",
    "edit",
    "gradcam",
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
