"""Made-up steps with updates: what the rules about learning are asked with."""

from typing import Any

import numpy as np

from gradwatch.core.alert import Finding
from gradwatch.core.history import History
from gradwatch.rules import Rule
from made_up import NAN, record

Outcome = list[list[Finding] | None]

USUAL = 1000**0.25
"""The usual norm of the weights of a made-up layer, which has 1,000."""


def play(rule: Rule, history: History, rows: list[dict[str, Any]]) -> Outcome:
    """As the engine does: the rule is asked before the step, the update is known after it. `updates`: one per layer."""
    outcome = []
    for row in rows:
        more = dict(row)
        updates, clipped = more.pop("updates", None), more.pop("clipped", None)
        record(history, **({"weights": USUAL} if updates is not None else {}) | more)
        found = rule(history)
        outcome.append(found if found is None else list(found))
        shape, late = history.layout, {}
        for name, numbers in (("update_ratio", updates), ("grad_norm_clipped", clipped)):
            if numbers is not None:
                line = np.full(len(shape), NAN)
                line[shape.layers] = numbers
                line[shape.parameters] = line[shape.owners]
                line[0] = np.nanmax(line)
                late[name] = line
        history.amend(late)
    return outcome


def steps(count: int, **row: Any) -> list[dict[str, Any]]:
    return [{"loss": 1.0, "updates": 1e-3, "lr": 0.1, **row}] * count


def findings(outcome: Outcome) -> list[Finding]:
    return [finding for found in outcome for finding in found or ()]


def still(count: int = 30, **row: Any) -> list[dict[str, Any]]:
    return steps(count, **{"updates": 1e-9, "lr": 1e-9, **row})


def jump(**far: Any) -> list[dict[str, Any]]:
    return [*steps(60), *[{"loss": 40.0, "gradients": 20.0, "lr": 0.1, **far}] * 3]
