"""Which interventions act on which parameters and where, and what stays the same from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwatch.core.guard import UserFacingError
from gradwatch.core.record import Layout
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.interventions.gradient_hooks import GradientHooks
from gradwatch.engine.interventions.multiply import CpuScalars
from gradwatch.engine.interventions.step_effect import ChangeCounts
from gradwatch.interventions import Action, Gate, Intervention, ParameterScope, Scaling
from gradwatch.measure.device_buffer import Indices
from gradwatch.measure.devices import moved
from gradwatch.measure.optimizer_parameters import OptimizerParameters


@dataclass(slots=True, eq=False)
class ActiveIntervention:
    """One intervention in this run."""

    number: int
    intervention: Intervention
    counts: ChangeCounts
    action: Action | None = None
    waiting: Mapping[str, Any] | None = None
    """A memory that was loaded before the action was created."""
    indices: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    """The parameters that it acts on, as positions in the layout's `parameters`."""
    device_indices: Tensor | None = None
    """The same on the device; None for all parameters."""
    hooked: bool = False
    """Whether it acts in hooks, not at the step."""
    sites: Indices | None = None
    """The layers on whose signals it acts; then it has no `indices`."""


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
    scalars: CpuScalars
    device_indices: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """Positions of gradients that are edited together -> the same on the device."""


def make_plan(
    interventions: Sequence[ActiveIntervention],
    optimizer_parameters: OptimizerParameters,
    count: int,
    device: torch.device,
) -> StepPlan:
    """The plan for the gradients that `optimizer_parameters` has now. `count`: number of all parameters."""
    absent = optimizer_parameters.absent or [True] * len(optimizer_parameters.indices)
    measured = {index for index, none in zip(optimizer_parameters.indices, absent, strict=True) if not none}
    present, applied = [], []
    keys: list[tuple[int, ...]] = [() for _ in optimizer_parameters.indices]
    for active in interventions:
        has_gradient = np.array([index in measured for index in active.indices.tolist()], dtype=bool)
        within = None if has_gradient.all() else moved(torch.from_numpy(np.flatnonzero(has_gradient)), device)
        present.append(moved(torch.from_numpy(has_gradient), device))
        applied.append((active.indices[has_gradient], within))
        own = active.action.groups if isinstance(active.action, Scaling) else ()
        group = dict(zip(active.indices.tolist(), own, strict=False))
        keys = [(*key, group.get(index, -1)) for key, index in zip(keys, optimizer_parameters.indices, strict=True)]
    known: dict[tuple[int, ...], int] = {}
    in_order = optimizer_parameters.indices == list(range(count))
    members = None if in_order else moved(torch.tensor(optimizer_parameters.indices, dtype=torch.int64), device)
    groups = [known.setdefault(key, len(known)) for key in keys]
    member_of = {index: member for member, index in enumerate(optimizer_parameters.indices)}
    return StepPlan(optimizer_parameters.absent, present, applied, groups, members, member_of, CpuScalars(len(groups)))


class CannotAct(UserFacingError, ValueError):  # noqa: N818 (the base says what it is)
    """An intervention cannot act where the user asked for it; raised at fit start."""


def acts_in_hooks(active: ActiveIntervention, *, sharded: bool) -> bool:
    """Whether `active` acts in hooks: only if the user asked for it; "auto" means at the step.

    Acting on gradients as they are made differs from acting on what the optimizer uses if a second backward pass, a
    checkpointed shared segment or a callback that edits gradients comes later (in 4 of 34 ways to train). Hooks also
    take longer: scaling 102 tensors takes 7 % of a step at the step and 57 % in hooks (measured on a CPU).

    Raises CannotAct for an action that cannot run in a hook.
    """
    action, settings = active.action, active.intervention.settings
    if settings.at != "hook" or settings.on == "signal" or sharded:  # the hooks of shards are never called
        return False
    why = ""
    if isinstance(action, Scaling) and not action.constant and len(set(action.groups)) < len(action.groups):
        why = "needs the gradients of several parameters at once, and a hook has one"
    elif isinstance(action, Gate):
        why = "decides whether a step happens"
    elif action is not None and action.memory is not None:
        why = "remembers the gradients that were used, which a hook does not see"
    if why:
        raise CannotAct(f"interventions: {active.intervention}, at='hook': it {why}; expected at='step' or 'auto'")
    return True


def before_hooks(
    hooks: GradientHooks, interventions: Sequence[ActiveIntervention], norms: Tensor, *, ranks: int
) -> Tensor:
    """The norms of the gradients before hooks acted on them, shape [parameters]; NaN where unknown.

    `norms`: those of now. What a hook was given is the whole gradient if it ran once, on one process. Otherwise
    the norm before a constant factor follows by division.
    """
    acting = [active for active in interventions if active.hooked and not active.intervention.settings.dry_run]
    product = torch.ones_like(norms)
    known = np.ones(len(norms), dtype=bool)
    for active in acting:
        product = product * hooks.factors[active.number].to(norms.dtype)
        known[active.indices] &= isinstance(active.action, Scaling) and active.action.constant
    once = np.array(hooks.calls) == 1 if ranks == 1 else np.zeros(len(norms), dtype=bool)
    given = hooks.before.to(norms.dtype)
    if hooks.scale is not None:
        given = given / moved(hooks.scale, given.device)
    seen, divided = (moved(torch.from_numpy(mask), norms.device) for mask in (once, known))
    quotient = torch.where(divided & (product != 0), norms / product, torch.nan)
    return torch.where(seen, given, quotient)


def described(interventions: Sequence[ActiveIntervention], mode: TrainingMode, *, sharded: bool) -> str:
    """What acts where, in words, for the start-up line."""
    names: dict[str, list[str]] = {"hook": [], "step": [], "signal": []}
    for active in interventions:
        where = "signal" if active.sites is not None else "hook" if active.hooked else "step"
        names[where].append(str(active.intervention) + " (dry run)" * active.intervention.settings.dry_run)
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
