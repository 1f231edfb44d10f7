"""The parameters that one optimizer holds, and the plans by which their gradients and weights are reduced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_, methodcaller

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import (
    FROZEN,
    LAZY,
    MEASURED,
    NO_GRADIENT,
    NO_OPTIMIZER,
    OTHER_OPTIMIZER,
    UNMEASURABLE,
    Codes,
)
from gradwatch.measure.device_buffer import CLIP_CHECKS, DeviceBuffer, Indices
from gradwatch.measure.dtensor import largest_part, local_tensor
from gradwatch.measure.layers import REMOVED, is_lazy
from gradwatch.measure.optimizer_steps import WatchedOptimizer
from gradwatch.measure.reductions import NORM, WITH_NORM, Plan, Reduction, version_of
from gradwatch.measure.site_values import Coverage
from gradwatch.measure.stale_gradients import StaleGradientCheck
from gradwatch.measure.weight_updates import UpdateNorms

CHANGE_CHECKS = 8
"""Parameters of an optimizer whose gradients show for all, between samples, whether they were changed. Judgement."""

UNUSUAL, FADES = 10.0, 0.9
"""Ratio of the sum of all norms to the largest of the steps before, by which a step is unusual; and what is left of
that with each step. Judgement: in trainings whose norms jump up and down, few steps are."""

DISAGREE = 1e-3
"""Relative difference by which the same norm, taken twice, shows that the gradient was changed between."""

TINY = 1e-15
"""Absolute difference that shows nothing: norms as small may have been lost in float32. Judgement."""

_GRADIENT, _VERSION, _ADDRESS = attrgetter("grad"), attrgetter("_version"), methodcaller("data_ptr")
_TRAINS = attrgetter("requires_grad")


@dataclass(slots=True, eq=False)
class OptimizerParameters:
    """One optimizer's watched parameters. A member is a position in `parameters`, an index one in the reader's."""

    param_groups: list[list[nn.Parameter]]
    """All parameters of the optimizer, watched or not, group by group, to see when they change."""
    indices: list[int]
    parameters: list[nn.Parameter]
    watched: WatchedOptimizer
    stale_gradients: StaleGradientCheck
    absent: list[bool] | None = None
    """Which members had no gradient at the last measured step."""
    trains: list[bool] | None = None
    """Which members required one then."""
    coverage: Coverage | None = None
    """What there is of the gradient; None where it has to be found out."""
    sharded: bool = False
    """Whether there are parameters of which this rank has a part only: parts are what is measured."""
    steps_unreported: bool = False
    """Whether the optimizer has stepped before any step of it was measured."""
    unusual: bool = True
    """Whether the gradients look unlike those of the steps before, at a glance: not finite, or far larger."""
    marked: tuple[list[Tensor | None], list[int]] | None = None
    """The gradients that are watched for changes, and `_as_written` of them when they were measured; let go after the
    step.
    """
    remeasured: dict[str, Indices] = field(default_factory=dict)
    """Row -> slots of gradients that were measured again, until what follows the step is read."""
    _plans: dict[str, tuple[Plan, Indices]] = field(default_factory=dict)
    _updates: UpdateNorms | None = None
    _clip_checks: tuple[int, ...] | None = None
    """As `clip_checks` gives them; None until asked for."""
    _largest_sum: float = np.nan
    """Sum of all norms, as far as the host sees them at once: the largest so far, which fades with each step."""
    _checked: list[nn.Parameter] = field(init=False)
    _all_local: bool | None = None
    """Whether every parameter is there as it is: none is a DTensor, none lazy, none of a type without a norm."""

    def __post_init__(self) -> None:
        self._checked = self.parameters[:: max(1, len(self.parameters) // CHANGE_CHECKS)]

    @property
    def never_measured(self) -> bool:
        """Whether the optimizer steps, and no step of it was measured."""
        return self.steps_unreported and self.absent is None

    def is_fused(self) -> bool:
        """Whether the optimizer writes weights by kernels whose writes torch does not count."""
        return any(group.get("fused") for group in getattr(self.watched.ref(), "param_groups", ()))

    def gradients(self) -> list[Tensor | None]:
        """The gradients, or of sharded ones the parts that this rank has, as plain tensors."""
        gradients = list(map(_GRADIENT, self.parameters))
        if not self.sharded:
            return gradients
        return [None if gradient is None else local_tensor(gradient) for gradient in gradients]

    def read_gradients(self) -> list[Tensor | None]:
        """`gradients`, of a step that is to be measured, with a mark on a few of them: a clipping would change all.

        Where others are there than at the last one, plans are made anew; also where others are required, what there is
        of them (`coverage`) has to be found out.
        """
        gradients = self.gradients()
        absent, trains = list(map(is_, gradients, repeat(None))), list(map(_TRAINS, self.parameters))
        if absent != self.absent or trains != self.trains:
            if absent != self.absent:
                self._plans.clear()
                self._clip_checks = None
            self.absent, self.trains, self.coverage = absent, trains, None
        self.marked = _as_written(self._checked)
        return gradients

    def mark(self) -> None:
        """What is there now of a few gradients is what is meant: `take_changed` tells whether it is used."""
        self.marked = _as_written(self._checked)

    def take_changed(self, *, keep: bool = False) -> bool:
        """Whether one of the few is another than when it was marked, or was written since; the mark is let go, unless
        `keep`.
        """
        marked = self.marked
        if not keep:
            self.marked = None
        if marked is None or self.sharded:
            return marked is None  # torch does not count what is written to the parts of a DTensor
        now = _as_written(self._checked)
        return not all(map(is_, now[0], marked[0])) or now[1] != marked[1]

    def clip_checks(self) -> tuple[int, ...]:
        """The smallest members that have a gradient: their norms show, after a clipping of all gradients by their
        common norm, that it was one. None of them where that norm cannot be known to 1e-5: some parameters are not
        watched, or narrower than float32.
        """
        if self._clip_checks is None:
            numels = [0 if none else p.numel() for none, p in zip(self.absent or (), self.parameters, strict=True)]
            all_watched = len({id(p) for group in self.param_groups for p in group}) == len(self.parameters)
            wide = all(p.dtype in (torch.float32, torch.float64) for p in self.parameters)
            there = sorted((m for m, numel in enumerate(numels) if numel), key=numels.__getitem__)
            usable = all_watched and wide and not self.sharded and len(there) >= CLIP_CHECKS
            self._clip_checks = tuple(there[:CLIP_CHECKS]) if usable else ()
        return self._clip_checks

    def weights(self) -> Sequence[Tensor | None]:
        """The weights, or of sharded ones the parts that this rank has; None for lazy ones, and for those of a type
        that has no norm.
        """
        if self._all_local is None:
            self._all_local = not self.sharded and all(map(_has_norm, self.parameters))
        return (
            self.parameters
            if self._all_local
            else [local_tensor(p.detach()) if _has_norm(p) else None for p in self.parameters]
        )

    def release(self) -> None:
        """Drop what was kept for after the step."""
        self.remeasured, self.marked = {}, None
        if self._updates is not None:
            self._updates.drop()

    def reduce(
        self, buffer: DeviceBuffer, row: str, tensors: Sequence[Tensor | None], *, reduction: Reduction = NORM
    ) -> Indices:
        """Reduce `tensors`, one per member, into `row` of the buffer; the slot of each parameter."""
        with torch.no_grad():
            try:
                plan, index = self._plans[row]
                summed = plan.run(tensors)
            except (KeyError, TypeError, RuntimeError):
                # none was made, or one for other shapes, layouts or dtypes: plan for what is there now
                plan = Plan(tensors, buffer[row], reduction=reduction)
                summed = plan.run(tensors)
                index = np.full(buffer.places, -1, dtype=np.intp)
                index[[self.indices[member] for member in plan.positions]] = np.arange(len(plan.positions))
                self._plans[row] = plan, index
        if row == "grad_norm":
            self.unusual = not summed <= self._largest_sum * UNUSUAL < np.inf
            if summed < np.inf:  # and a number
                self._largest_sum = max(summed, FADES * self._largest_sum)
        return index

    @torch.no_grad()
    def copy_weights(self, buffer: DeviceBuffer) -> None:
        """Keep the weights for `update_norms`."""
        if self._updates is None:
            # by the largest part that any rank has, so that all ranks copy the same parameters
            sizes = [(largest_part(p), p.element_size()) if _has_norm(p) else (0, 1) for p in self.parameters]
            self._updates = UpdateNorms(sizes)
        self._updates.copy(self.weights(), buffer, turn=self.watched.observed.samples - 1)

    def update_norms(self, buffer: DeviceBuffer) -> dict[str, Indices]:
        """Norms of how far the copied weights have moved since; the copies are let go."""
        if self._updates is None:
            return {}
        with torch.no_grad():
            members = self._updates.compare(self.weights())
        if not members:
            return {}
        index = np.full(buffer.places, -1, dtype=np.intp)
        index[[self.indices[member] for member in members]] = np.arange(len(members))
        return {"updates": index}


def _as_written(parameters: list[nn.Parameter]) -> tuple[list[Tensor | None], list[int]]:
    """The gradients of `parameters`, and what changes when one of them is written to: versions and addresses."""
    gradients = list(map(_GRADIENT, parameters))
    try:
        # another address: `p.grad.data = ...` gives the same tensor other memory, and does not count as a write
        return gradients, [*map(_VERSION, gradients), *map(_ADDRESS, gradients)]
    except (AttributeError, RuntimeError):  # one is not there, is sparse, or was made in inference mode
        return gradients, [version_of(gradient) for gradient in gradients if gradient is not None]


def missing_codes(
    parameters: Sequence[nn.Parameter],
    all_held: Collection[OptimizerParameters],
    held: OptimizerParameters,
) -> Codes:
    """One `Missing` for each of all `parameters` at a step of the optimizer of `held`."""
    found = np.full(len(parameters), OTHER_OPTIMIZER, dtype=np.int8)
    places = [place for other in all_held if other.watched.ref() is not None for place in other.indices]
    for place in set(range(len(parameters))).difference(places):
        found[place] = _idle(parameters[place])
    for other in all_held:
        if other.never_measured:
            found[other.indices] = UNMEASURABLE
    absent, own = held.absent, held.parameters
    assert absent is not None, "its gradients were looked at"
    found[held.indices] = MEASURED
    for member, trains in enumerate(map(_TRAINS, own)):
        if absent[member] or not trains:
            found[held.indices[member]] = _unlike_most(own[member], held)
    return found


def _unlike_most(parameter: nn.Parameter, held: OptimizerParameters) -> int:
    """What there is of one without a gradient, or frozen."""
    gradient = parameter.grad
    if gradient is None:
        code = NO_GRADIENT if parameter.requires_grad else FROZEN
        return LAZY if is_lazy(parameter) else code
    if parameter.requires_grad or held.sharded or gradient.layout is not torch.strided:
        return MEASURED
    return MEASURED if gradient.any() else FROZEN  # `zero_grad(set_to_none=False)` leaves zeros


def _has_norm(parameter: nn.Parameter) -> bool:
    """Whether torch has norms and differences of it; not of a lazy one."""
    return (parameter.dtype in WITH_NORM or parameter.is_complex()) and not is_lazy(parameter)


def _idle(parameter: nn.Parameter) -> int:
    """Why one that no optimizer holds has no number."""
    if parameter is REMOVED:
        return UNMEASURABLE
    return NO_OPTIMIZER if parameter.requires_grad else FROZEN
