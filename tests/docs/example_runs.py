"""The examples that show a fault and its fix, run in this process as a user would: what both trainings said."""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from gradwatch import GradWatch
from gradwatch.core.alert import Alert

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

LAYERS = {
    "stale_grad": "total",
    "nonfinite": "body.2",
    "underflow": "body.2",
    "tampered": "body.0",
    "bad_head": "head",
    "input_scale": "body.0",
    "divergence": "head",
    "act_blowup": "q_proj",
    "collapse": "body.0",
    "saturation": "body.2",
    "dead": "body.4",
    "disconnected": "body.6",
    "frozen": "body.0",
    "stalled": "total",
    "exploding": "body.0",
    "vanishing": "body.0",
    "spike": "head",
}
"""Rule, and so the example's name -> the layer that its alert names first; "total" where it is no one layer's fault."""

MORE = {"vanishing_rnn": ("vanishing", "rnn", "of 40 time steps of layer rnn is ")}
"""Further examples of a fault and its fix -> rule, the layer that is named first, words of the alert."""


@dataclass(frozen=True)
class Outcome:
    """What an example's two trainings came to."""

    unhealthy: GradWatch
    before: float
    """Share of the held-out digits that the unhealthy model reads."""
    fixed: GradWatch
    after: float
    printed: str

    def alert(self, rule: str) -> Alert:
        """The unhealthy training's incident of that rule; fails where there is none."""
        found = [alert for alert in self.unhealthy.alerts if alert.rule == rule]
        assert found, f"{rule} was not raised, but {[str(alert) for alert in self.unhealthy.alerts]}"
        return found[0]


def outcome(example: str) -> Outcome:
    """Run `examples/<example>.py` from its first line to its last."""
    sys.path.insert(0, str(EXAMPLES))  # where Python looks when it is given a script
    try:
        with redirect_stdout(StringIO()) as printed:
            names = runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    finally:
        sys.path.remove(str(EXAMPLES))
    return Outcome(names["unhealthy"], names["before"], names["fixed"], names["after"], printed.getvalue())
