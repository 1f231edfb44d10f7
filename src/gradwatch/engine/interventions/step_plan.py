"""Which interventions act on which parameters and where, and what stays the same from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gradwatch.core.record import Layout
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.interventions.active_intervention import ActiveIntervention
from gradwatch.interventions import ParameterScope, Scaling
from gradwatch.measure.device_buffer import Indices
from gradwatch.measure.devices import moved
from gradwatch.measure.optimizer_parameters import OptimizerParameters


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What stays the same from step to step while an optimizer has the same gradients."""

    absent: list[bool] | None
    present: list[Tensor]
    """For each intervention, which of its parameters have a gradient now: bool, shape [n], on the device."""
    applied: list[tuple[Indices, Tensor | None]]
    """For each intervention, the positions of those, and their indices among its n on the device, None for all n."""
    groups: list[int]
    """One index for each member, equal only for members whose factors are always equal."""
    members: Tensor | None
    """The position of each member, on the device; None if they are all the parameters, in order."""
    member_of: dict[int, int]
    """Position -> member."""
    device_indices: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Positions of gradients that are edited together -> the same on the device."""


def make_plan(
    interventions: Sequence[ActiveIntervention],
    held: OptimizerParameters,
    count: int,
    device: torch.device,
) -> StepPlan:
    """The plan for the gradients that `held` has now. `count`: number of all parameters."""
    absent = held.absent or [True] * len(held.indices)
    measured = {index for index, none in zip(held.indices, absent, strict=True) if not none}
    present, applied = [], []
    keys: list[tuple[int, ...]] = [() for _ in held.indices]
    for active in interventions:
        has_gradient = np.array([index in measured for index in active.indices.tolist()], dtype=bool)
        within = None if has_gradient.all() else moved(torch.from_numpy(np.flatnonzero(has_gradient)), device)
        present.append(moved(torch.from_numpy(has_gradient), device))
        applied.append((active.indices[has_gradient], within))
        own = active.action.groups if isinstance(active.action, Scaling) else ()
        group = dict(zip(active.indices.tolist(), own, strict=False))
        keys = [(*key, group.get(index, -1)) for key, index in zip(keys, held.indices, strict=True)]
    known: dict[tuple[int, ...], int] = {}
    in_order = held.indices == list(range(count))
    members = None if in_order else moved(torch.tensor(held.indices, dtype=torch.int64, device="cpu"), device)
    groups = [known.setdefault(key, len(known)) for key in keys]
    member_of = {index: member for member, index in enumerate(held.indices)}
    return StepPlan(held.absent, present, applied, groups, members, member_of)


def described(interventions: Sequence[ActiveIntervention], mode: TrainingMode, *, sharded: bool) -> str:
    """What acts where, in words, for the start-up line."""
    names: dict[str, list[str]] = {"hook": [], "step": [], "signal": []}
    for active in interventions:
        where = "signal" if active.on_signals else "hook" if active.hooked else "step"
        names[where].append(f"{active}{' (dry run)' * active.dry}")
    parts = []
    if hooked := names["hook"]:
        each = ["micro-batch"] * (mode.accumulate > 1) + ["rank"] * (mode.ranks > 1)
        each = each or ([] if mode.loop == "automatic" else ["backward pass"])
        one = f"of each {' and '.join(each)} by itself" if each else "as they are made"
        parts.append(f"in the hooks, on gradients {one}: {', then '.join(hooked)}")
    if at_step := names["step"]:
        why = (
            " (shards have no hooks)"
            if sharded and any(active.intervention.settings.at == "hook" for active in interventions)
            else ""
        )
        parts.append(f"at every step, on the optimizer's gradients{why}: {', then '.join(at_step)}")
    if on_signals := names["signal"]:
        each = ["call", *["micro-batch"] * (mode.accumulate > 1), *["rank"] * (mode.ranks > 1)]
        parts.append(f"on the layers' signals, of each {' and '.join(each)} by itself: {', then '.join(on_signals)}")
    return "; ".join(parts) + (f"; before {mode.clipping}" if parts and mode.clipping else "")


def scope_of(layout: Layout, indices: Indices, device: torch.device) -> ParameterScope:
    """The scope of the parameters at `indices`."""
    owners = layout.owners[indices]
    unique, inverse = np.unique(owners, return_inverse=True)
    names = layout.names(layout.parameters[indices])
    return ParameterScope(names, layout.names(unique), tuple(inverse.tolist()), device)
