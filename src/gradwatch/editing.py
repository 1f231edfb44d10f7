"""Interventions that change elements: gradients edited one by one, and the norms that are left."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwatch.interventions import Editing
from gradwatch.probe import Probe
from gradwatch.reading import Places
from gradwatch.stats import norm_into, widest_type
from gradwatch.turn import Part, Step


def edited(part: Part, probe: Probe, step: Step, scale: Tensor | None, index: int, sound: Tensor | None) -> Tensor:
    """Edit the gradients one by one; by how much that has changed their norms, shape [n]."""
    assert isinstance(part.action, Editing)
    before = step.own(part)
    changed = torch.zeros_like(before, dtype=torch.bool)
    row, slots = "grad_norm_clipped", np.full(len(probe.parameters), -1, dtype=np.intp)
    for i, place in enumerate(part.places.tolist()):
        found = step.tensors(place)
        if found is None:
            continue
        new, differs = part.action.edit(*found, scale, index)
        slots[place] = len(probe.parameters) + place
        norm_into(new, probe.slab.hook_slot(row, place))
        changed[i] = differs
        if not part.intervention.aim.dry_run:
            step.replace(place, new if sound is None else torch.where(sound, new, found[0]))
    if probe.shards is not None:
        _, exchanged = probe.shards.whole({row: slots})
        slots = exchanged[row]
    after = norms_of(probe, row, slots)[torch.from_numpy(part.places).to(before.device, non_blocking=True)]
    if scale is not None:
        after = after / scale
    # only where bits have changed: two ways to the same norm round differently
    return torch.where(changed & (before > 0), after / before, 1.0)


def norms_of(probe: Probe, row: str, slots: Places) -> Tensor:
    """A row's norms of all parameters on the device, 0 where `slots` is -1, in the widest type there is. Of shards
    those of the whole, as they were last exchanged: the same bits on every rank.
    """
    device = probe.slab.device
    where = torch.from_numpy(slots).to(device, non_blocking=True)
    numbers = probe.slab[row] if probe.shards is None else probe.shards.latest[row]
    return torch.where(where >= 0, numbers[where], 0.0).to(widest_type(device))
