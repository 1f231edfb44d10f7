"""GradWatch: one line tells you which layers' gradients vanish, explode, die or turn non-finite.

The public names are loaded when they are first used: `import gradwatch` imports neither torch nor lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwatch.alert import Alert, Finding, Severity, Verdict
    from gradwatch.backward import backward_hook
    from gradwatch.callback import GradWatch
    from gradwatch.capturing import capture
    from gradwatch.class_maps import gradcam, overlay
    from gradwatch.editing import edit
    from gradwatch.history import History
    from gradwatch.record import Record
    from gradwatch.rules import default_rules
    from gradwatch.watch import Watch

__version__ = "0.1.0"

_HOMES = {
    "Alert": "alert",
    "Finding": "alert",
    "GradWatch": "callback",
    "History": "history",
    "Record": "record",
    "Severity": "alert",
    "Verdict": "alert",
    "Watch": "watch",
    "backward_hook": "backward",
    "capture": "capturing",
    "default_rules": "rules",
    "edit": "editing",
    "gradcam": "class_maps",
    "overlay": "class_maps",
}

__all__ = [
    "Alert",
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
