"""The gradients of one step while interventions act: their present norms, and the factors still to be applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwatch.engine.interventions.gradient_hooks import norms_of
from gradwatch.engine.interventions.multiply import multiply as multiply_gradients
from gradwatch.engine.interventions.multiply import multiply_each, sharing_memory
from gradwatch.engine.interventions.step_plan import ActiveIntervention, StepPlan
from gradwatch.interventions import Editing
from gradwatch.measure.device_buffer import Places, host_view
from gradwatch.measure.devices import moved
from gradwatch.measure.dtensor import full_tensor, is_partial, is_row_sharded, shard_like, stored_part
from gradwatch.measure.optimizer_parameters import OptimizerParameters


class StepGradients:
    """The present norms, and the factors by which the gradients are still to be multiplied."""

    def __init__(
        self,
        optimizer_parameters: OptimizerParameters,
        plan: StepPlan,
        norms: Tensor,
        other_gradients: Sequence[Tensor],
        *,
        last: ActiveIntervention,
    ) -> None:
        """`other_gradients`: gradients of other optimizers. `last`: the last intervention; it is followed by none."""
        self.norms, self._last = norms, last
        self.edited = False
        """Whether norms were measured again after an edit."""
        self._optimizer_parameters, self._plan, self._other_gradients = optimizer_parameters, plan, other_gradients
        self._product: Tensor | None = None
        self._constants: dict[int, float] = {}
        self._shared_memory: set[int] | None = None

    def norms_of(self, active: ActiveIntervention) -> Tensor:
        """The norms of what `active` acts on, shape [n]."""
        return self.norms if active.device_indices is None else self.norms[active.device_indices]

    def set_norms(self, active: ActiveIntervention, norms: Tensor) -> None:
        """Set the norms of what `active` acts on, shape [n]."""
        self.norms = norms if active.device_indices is None else self.norms.index_copy(0, active.device_indices, norms)
        self.edited = True

    def multiply(self, active: ActiveIntervention, indices: Places, factors: Tensor | float) -> None:
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

    def apply_factors(self) -> None:
        """Multiply the gradients."""
        optimizer_parameters, known, factors = self._optimizer_parameters, self._constants, self._product
        if factors is not None:
            numbers = host_view(factors)
            if numbers is not None and not known and (numbers == 1.0).all():
                factors = None
            elif self._plan.members is not None:
                factors = factors[self._plan.members]
        if factors is not None or known:
            multiply_gradients(
                optimizer_parameters.parameters,
                self._gradients(),
                factors=factors,
                constants={self._plan.member_of[index]: factor for index, factor in known.items()},
                groups=self._plan.groups,
                scalars=self._plan.scalars,
                others=self._other_gradients,
            )
        self._product, self._constants = None, {}

    def multiply_units(
        self, indices: Sequence[int], action: Editing, scale: Tensor | None
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
            parameter = None if member is None else self._optimizer_parameters.parameters[member]
            if parameter is None or parameter.grad is None or member in self._in_shared_memory():
                continue
            gradient, weight = parameter.grad.detach(), parameter.detach()
            plain = gradient.layout is torch.strided and gradient.is_floating_point() and gradient.numel() > 0
            if plain and weight.layout is torch.strided and weight.dtype is gradient.dtype:
                own = groups.setdefault((gradient.device, weight.device, gradient.dtype), ([], [], []))
                for each, what in zip(own, (index, gradient, weight), strict=True):
                    each.append(what)  # type: ignore[attr-defined]
        for own_indices, gradients, weights in groups.values():
            factors, differs = action.factors(gradients, weights, scale)
            seen = host_view(differs)
            if seen is None or seen.any():
                multiply_each(gradients, factors)
            key = tuple(own_indices)
            if key not in self._plan.device_indices:
                there = torch.tensor(own_indices, dtype=torch.int64)
                self._plan.device_indices[key] = moved(there, self.norms.device)
            yield own_indices, self._plan.device_indices[key], norms_of(gradients), differs

    def edit(
        self, index: int, action: Editing, scale: Tensor | None, step: int, *, intact: Tensor | None, dry: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Edit the gradient of the parameter at `index`; for a shard, the part that this rank has.

        An action that needs whole rows gets all of a gradient of which this rank has none: the ranks exchange it.
        `intact`: bool, 0-d, without which nothing is written. `dry`: write nothing. Returns the new gradient and
        whether it differs, bool, 0-d; None without a gradient. Raises ValueError where the gradient is a sum over ranks
        that has not been taken yet.
        """
        member = self._plan.member_of.get(index)
        parameter = None if member is None else self._optimizer_parameters.parameters[member]
        if parameter is None or parameter.grad is None:
            return None
        if is_partial(parameter.grad):
            raise ValueError("a gradient is a sum over ranks that is still pending; only factors can act on it")
        local = stored_part(parameter.grad)
        if action.whole_rows and not is_row_sharded(parameter.grad):
            new, differs = action.edit(full_tensor(parameter.grad), full_tensor(parameter.detach()), scale, step)
            new = shard_like(new, parameter.grad)
        else:
            new, differs = action.edit(local, stored_part(parameter.detach()), scale, step)
        if not dry:
            self._replace(index, new if intact is None else torch.where(intact, new, local))
        return new, differs

    def _replace(self, index: int, new: Tensor) -> None:
        """Replace a gradient by `new`: in its own memory, unless other tensors share that."""
        member = self._plan.member_of[index]
        parameter = self._optimizer_parameters.parameters[member]
        assert parameter.grad is not None
        if parameter.grad.layout is not torch.strided or member in self._in_shared_memory():
            parameter.grad = new
        else:
            stored_part(parameter.grad).copy_(new)

    def _in_shared_memory(self) -> set[int]:
        """The members whose gradients must not be written to; found out once a step."""
        if self._shared_memory is None:
            self._shared_memory = sharing_memory(self._gradients(), self._other_gradients)
        return self._shared_memory

    def _gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self._optimizer_parameters.parameters]
        if not self._optimizer_parameters.sharded:
            return gradients
        return [None if gradient is None else stored_part(gradient) for gradient in gradients]


def _times(numbers: Tensor, device_indices: Tensor | None, factors: Tensor | float) -> Tensor:
    """`numbers` with those at `device_indices` multiplied by `factors`; the float 0.0 gives 0 for any number."""
    chosen = numbers if device_indices is None else numbers[device_indices]
    zero = isinstance(factors, float) and factors == 0.0
    new = torch.zeros_like(chosen) if zero else chosen * factors
    return new if device_indices is None else numbers.index_copy(0, device_indices, new)
