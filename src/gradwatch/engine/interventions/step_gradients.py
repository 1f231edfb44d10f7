"""The gradients of one step while interventions act: their present norms, and the factors still to be applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from gradwatch.engine.interventions.active_intervention import ActiveIntervention
from gradwatch.engine.interventions.gradient_hooks import norm_ratio, norms_of
from gradwatch.engine.interventions.multiply import multiply, multiply_each, sharing_memory
from gradwatch.engine.interventions.step_plan import StepPlan
from gradwatch.interventions import Editing, Scaling
from gradwatch.measure.device_buffer import EDITED, Indices, host_view
from gradwatch.measure.devices import moved, widest_type
from gradwatch.measure.dtensor import full_tensor, is_partial, is_row_sharded, shard_like, stored_part
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.optimizer_parameters import OptimizerParameters
from gradwatch.measure.reductions import norm_of

DeviceSlots = tuple[Tensor, Tensor | None]
"""Slots of a row, -1 for none, and which are not -1; None for all."""


class StepGradients:
    """The present norms, and the factors by which the gradients are still to be multiplied."""

    def __init__(
        self,
        reader: GradientReader,
        held: OptimizerParameters,
        plan: StepPlan,
        norms: Tensor,
        *,
        step: int,
        scale: Tensor | None,
        last: ActiveIntervention,
    ) -> None:
        """`step`: the optimizer's steps before this one; `scale`: the loss scale that is in the gradients, 0-d; `last`:
        the last intervention; it is followed by none.
        """
        self.norms, self._plan, self._last = norms, plan, last
        self.edited = False
        """Whether norms were measured again after an edit."""
        self.intact = None if reader.shards is None else reader.shards.latest["failed"] == 0
        """Of shards, bool, 0-d: where it is false, nothing is done: what has failed on one rank is done on none."""
        self.held, self.step = held, step
        self._reader, self._scale = reader, scale
        own = frozenset(held.indices)
        everything = not own or len(own) == len(reader.parameters)
        others = () if everything else [p.grad for i, p in enumerate(reader.parameters) if i not in own]
        self._other_gradients = [gradient for gradient in others if gradient is not None]
        self._product: Tensor | None = None
        self._constants: dict[int, float] = {}
        self._shared_memory: set[int] | None = None

    def norms_of(self, active: ActiveIntervention) -> Tensor:
        """The norms of what `active` acts on, shape [n]."""
        return self.norms if active.device_indices is None else self.norms[active.device_indices]

    def scaling_factors(
        self, active: ActiveIntervention, action: Scaling, present: Tensor, *, window: float, partial: bool
    ) -> Tensor | float:
        """The factors of `action`, shape [n], or one for all. `window`: norms are divided by it; `partial`: whether
        some of the n gradients are not `present`.
        """
        factors = action.factors(self.norms_of(active) / window, present, self.step)
        if not isinstance(factors, Tensor):
            return factors
        factors = factors.nan_to_num(1.0, 1.0, 1.0)
        if self.intact is None and not partial:
            return factors
        return torch.where(present if self.intact is None else present & self.intact, factors, 1.0)

    def add_factors(self, active: ActiveIntervention, indices: Indices, factors: Tensor | float) -> None:
        """Multiply the gradients at `indices` by `factors` at the next `apply_factors`."""
        if active is not self._last or self.edited:  # after the last one no norm is needed
            self.norms = _times(self.norms, active.device_indices, factors)
        if isinstance(factors, float):
            for index in indices.tolist():
                self._constants[index] = self._constants.get(index, 1.0) * factors
        elif self._product is None and active.device_indices is None:
            self._product = factors
        else:
            before = torch.ones_like(self.norms) if self._product is None else self._product
            self._product = _times(before, active.device_indices, factors)

    def edit(self, active: ActiveIntervention, action: Editing, present: Tensor) -> Tensor:
        """Edit the gradients one by one; the factors by which their norms changed, shape [n]; see `norm_ratio`."""
        self.apply_factors()
        reader, before, dry = self._reader, self.norms_of(active), active.dry
        norms, edited = (reader.buffer[row] for row in EDITED)
        slots = np.full(len(reader.parameters), -1, dtype=np.intp)
        one_by_one: list[int] = active.indices.tolist()
        if action.factors is not None and reader.shards is None and not dry:
            for indices, device_indices, after, changed in self._multiply_units(one_by_one, action):
                slots[indices] = indices
                norms.index_copy_(0, device_indices, moved(after, norms.device, norms.dtype))
                edited.index_copy_(0, device_indices, moved(changed, edited.device, edited.dtype))
            one_by_one = [index for index in one_by_one if slots[index] < 0]
        for index in one_by_one:
            found = self._edit_one(index, action, dry=dry)
            if found is None:
                continue
            new, differs = found
            slots[index] = index
            norms[index].copy_(moved(norm_of(new), norms.device))
            edited[index].copy_(moved(differs, edited.device))
        own = active.device_indices
        if reader.shards is None:
            after, count = (row[: len(slots)] if own is None else row[own] for row in (norms, edited))
            after, changed = torch.where(present, after.to(widest_type(after.device)), 0.0), (count > 0) & present
        else:
            *_, slots_of_whole = reader.shards.add(EDITED, dict.fromkeys(EDITED, slots))
            there = slots_on_device(slots_of_whole[EDITED[0]], before.device)
            whole = (norms_in(reader, row, there) for row in EDITED)
            after, count = whole if own is None else (row[own] for row in whole)
            changed = count > 0
        if self._scale is not None:
            after = after / moved(self._scale, after.device)
        if not dry:
            self.norms = after if own is None else self.norms.index_copy(0, own, after)
            self.edited = True
        return norm_ratio(before, after, changed)

    def apply_factors(self) -> None:
        """Multiply the gradients."""
        held, known, factors = self.held, self._constants, self._product
        if factors is not None:
            numbers = host_view(factors)
            if numbers is not None and not known and (numbers == 1.0).all():
                factors = None
            elif self._plan.members is not None:
                factors = factors[self._plan.members]
        if factors is not None or known:
            multiply(
                held.parameters,
                self._gradients(),
                factors=factors,
                constants={self._plan.member_of[index]: factor for index, factor in known.items()},
                groups=self._plan.groups,
                others=self._other_gradients,
            )
        self._product, self._constants = None, {}

    def _multiply_units(
        self, indices: Sequence[int], action: Editing
    ) -> Iterator[tuple[list[int], Tensor, Tensor, Tensor]]:
        """Edit those of the gradients at `indices` that are dense, real and alone in their memory, all of one type on
        one device together, by the factors of `action`.

        Gives for each such group the indices, the same on the device of the norms, the new norms, and which gradients
        differ, bool.
        """
        assert action.factors is not None, "that is what they are multiplied by"
        groups: dict[tuple[object, ...], tuple[list[int], list[Tensor], list[Tensor]]] = {}
        for index in indices:
            member = self._plan.member_of.get(index)
            parameter = None if member is None else self.held.parameters[member]
            if parameter is None or parameter.grad is None or member in self._in_shared_memory():
                continue
            gradient, weight = parameter.grad.detach(), parameter.detach()
            plain = gradient.layout is torch.strided and gradient.is_floating_point() and gradient.numel() > 0
            if plain and weight.layout is torch.strided and weight.dtype is gradient.dtype:
                own = groups.setdefault((gradient.device, weight.device, gradient.dtype), ([], [], []))
                for each, what in zip(own, (index, gradient, weight), strict=True):
                    each.append(what)  # type: ignore[attr-defined]
        for own_indices, gradients, weights in groups.values():
            factors, differs = action.factors(gradients, weights, self._scale)
            seen = host_view(differs)
            if seen is None or seen.any():
                multiply_each(gradients, factors)
            key = tuple(own_indices)
            if key not in self._plan.device_indices:
                there = torch.tensor(own_indices, dtype=torch.int64, device="cpu")
                self._plan.device_indices[key] = moved(there, self.norms.device)
            yield own_indices, self._plan.device_indices[key], norms_of(gradients), differs

    def _edit_one(self, index: int, action: Editing, *, dry: bool) -> tuple[Tensor, Tensor] | None:
        """Edit the gradient of the parameter at `index`; for a shard, the part that this rank has.

        An action that needs whole rows gets all of a gradient of which this rank has none: the ranks exchange it.
        The new one is written to the memory of the gradient, unless other tensors share that; with `dry` nowhere.
        Returns it and whether it differs, bool, 0-d; None without a gradient.
        Raises ValueError where the gradient is a sum over ranks that has not been taken yet.
        """
        member = self._plan.member_of.get(index)
        parameter = None if member is None else self.held.parameters[member]
        if parameter is None or parameter.grad is None:
            return None
        if is_partial(parameter.grad):
            raise ValueError("a gradient is a sum over ranks that is still pending; only factors can act on it")
        local, scale, step = stored_part(parameter.grad), self._scale, self.step
        if action.whole_rows and not is_row_sharded(parameter.grad):
            new, differs = action.edit(full_tensor(parameter.grad), full_tensor(parameter.detach()), scale, step)
            new = shard_like(new, parameter.grad)
        else:
            new, differs = action.edit(local, stored_part(parameter.detach()), scale, step)
        if not dry:
            used = new if self.intact is None else torch.where(self.intact, new, local)
            if parameter.grad.layout is not torch.strided or member in self._in_shared_memory():
                parameter.grad = used
            else:
                local.copy_(used)
        return new, differs

    def _in_shared_memory(self) -> set[int]:
        """The members whose gradients must not be written to; found out once a step."""
        if self._shared_memory is None:
            self._shared_memory = sharing_memory(self._gradients(), self._other_gradients)
        return self._shared_memory

    def _gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self.held.parameters]
        if not self.held.sharded:
            return gradients
        return [None if gradient is None else stored_part(gradient) for gradient in gradients]


def _times(numbers: Tensor, device_indices: Tensor | None, factors: Tensor | float) -> Tensor:
    """`numbers` with those at `device_indices` multiplied by `factors`; the float 0.0 gives 0 for any number."""
    chosen = numbers if device_indices is None else numbers[device_indices]
    zero = isinstance(factors, float) and factors == 0.0
    new = torch.zeros_like(chosen) if zero else chosen * factors
    return new if device_indices is None else numbers.index_copy(0, device_indices, new)


def slots_on_device(slots: Indices, device: torch.device) -> DeviceSlots:
    there = moved(torch.from_numpy(slots), device)
    return there, None if slots.min(initial=0) >= 0 else there >= 0


def norms_in(reader: GradientReader, row: str, slots: DeviceSlots) -> Tensor:
    """The norms of all parameters in a row, on the device, 0 where `slots` is -1, in its widest float type.

    For shards, the norms of the whole gradients as last exchanged: the same bits on every rank.
    """
    numbers = reader.buffer[row] if reader.shards is None else reader.shards.latest[row]
    there, known = slots
    found = numbers[there].to(widest_type(numbers.device))
    return found if known is None else torch.where(known, found, 0.0)
