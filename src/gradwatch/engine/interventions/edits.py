"""Gradients edited one by one at the step, and by how much that has changed their norms."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwatch.engine.interventions.step_plan import ActiveIntervention, Step
from gradwatch.interventions import Editing
from gradwatch.interventions.in_hooks import change, norm_of
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.reductions import widest_type
from gradwatch.measure.site_values import Places


def edited(
    part: ActiveIntervention, probe: GradientReader, step: Step, scale: Tensor | None, index: int, sound: Tensor | None
) -> Tensor:
    """Edit the gradients one by one; by how much that has changed their norms, shape [n], as `change` has it."""
    assert isinstance(part.action, Editing)
    before = step.own(part)
    # any free rows: of the norms squares are added over ranks, of the other the numbers
    row, differ = "grad_norm_clipped", "zeros"
    slots = np.full(len(probe.parameters), -1, dtype=np.intp)
    for place in part.places.tolist():
        found = step.tensors(place, rows=part.action.whole_rows)
        if found is None:
            continue
        new, differs = part.action.edit(found.gradient, found.weight, scale, index)
        new = found.part(new)
        slots[place] = len(probe.parameters) + place
        probe.slab.hook_slot(row, place).copy_(norm_of(new), non_blocking=True)
        probe.slab.hook_slot(differ, place).copy_(differs, non_blocking=True)
        if not part.intervention.aim.dry_run:
            step.replace(place, new if sound is None else torch.where(sound, new, found.stored))
    if probe.shards is not None:
        slots = probe.shards.whole({row: slots, differ: slots})[1][row]
    there = torch.from_numpy(part.places).to(before.device, non_blocking=True)
    after, changed = norms_of(probe, row, slots)[there], norms_of(probe, differ, slots)[there] > 0
    if scale is not None:
        after = after / scale
    if not part.intervention.aim.dry_run:
        step.have(part, after)
    return change(before, after, changed)


def norms_of(probe: GradientReader, row: str, slots: Places) -> Tensor:
    """A row's norms of all parameters on the device, 0 where `slots` is -1, in the widest type there is. Of shards
    those of the whole, as they were last exchanged: the same bits on every rank.
    """
    device = probe.slab.device
    numbers = probe.slab[row] if probe.shards is None else probe.shards.latest[row]
    found = numbers[torch.from_numpy(slots).to(device, non_blocking=True)].to(widest_type(device))
    return found if slots.min(initial=0) >= 0 else torch.where(torch.from_numpy(slots >= 0).to(device), found, 0.0)
