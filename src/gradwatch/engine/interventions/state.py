"""What interventions keep over a resume: their counts, and what their actions remember."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwatch.engine.interventions.gates import Gates
from gradwatch.engine.interventions.step_plan import ActiveIntervention
from gradwatch.interventions import Memory


def kept(parts: Sequence[ActiveIntervention], gates: Gates) -> list[dict[str, Any]]:
    """One entry for each of `parts`: tensors, numbers and text."""
    memories = [part.action.memory if part.action else None for part in parts]
    return [
        {
            "tally": part.tally.state_dict(),
            "gate": gates.state_dict(part.number),
            "memory": memory.state_dict() if memory else None,
        }
        for part, memory in zip(parts, memories, strict=True)
    ]


def restore(parts: Sequence[ActiveIntervention], gates: Gates, state: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError, TypeError or LookupError for a state that does not fit."""
    if len(state) != len(parts):
        raise ValueError(f"the state is of {len(state)} interventions, there are {len(parts)}")
    for part, saved in zip(parts, state, strict=True):
        part.tally.load_state_dict(saved["tally"])
        gates.load_state_dict(part.number, saved.get("gate"))
        part.waiting = saved["memory"]
        if part.action:
            remember(part, None)


def remember(part: ActiveIntervention, before: Memory | None) -> None:
    """Hand a new action what is known from before: from a state, or from the action that it replaces."""
    memory = part.action.memory if part.action else None
    state, part.waiting = part.waiting or (before.state_dict() if before else None), None
    if memory is not None and state is not None:
        memory.load_state_dict(state)
