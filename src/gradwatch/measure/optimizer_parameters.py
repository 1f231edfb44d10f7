"""The parameters that one optimizer holds, and the plans by which their gradients and weights are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradwatch.core.record import Missing
from gradwatch.measure.device_buffer import DeviceBuffer
from gradwatch.measure.dtensor import largest_part, local_tensor
from gradwatch.measure.layers import REMOVED, is_lazy
from gradwatch.measure.reductions import NORM, FloatLimits, Plan, Reduction, norm_into, version_of
from gradwatch.measure.site_values import Codes, Places
from gradwatch.measure.weight_updates import ROW, UpdateNorms

WITNESSES = 8
"""Parameters of an optimizer whose gradients show for all, between samples, whether they were changed. Judgement."""

ODD = 10.0
"""Ratio of the sums of all norms by which a step is unlike the one before. Judgement."""

DISAGREE = 1e-3
"""Relative difference by which the same norm, taken twice, shows that the gradient was changed between."""

_set_grad_enabled = torch._C._set_grad_enabled
"""What `torch.no_grad` is made of: that itself takes 30 us more when it is entered once a step (measured).
Private by name; tests/measure/test_optimizer_parameters.py notices if it moves."""

Norms = NDArray[np.float32 | np.float64]

Fingerprints = tuple[list[Tensor | None], list[int]]


@dataclass(slots=True, eq=False)
class OptimizerParameters:
    """One optimizer's watched parameters. A member is an index into `parameters`, a place one into the probe's."""

    held: list[list[nn.Parameter]]
    """All that the optimizer holds, watched or not, group by group, to see when that changes."""
    places: list[int]
    parameters: list[nn.Parameter]
    hooked: list[int]
    """Members whose gradients are measured inside their hooks."""
    hooked_at: list[int] = field(init=False)
    """The places of `hooked`."""
    alive: Callable[[], Any]
    """Gives the optimizer, None once it is gone."""
    absent: list[bool] | None = None
    """Which members had no gradient at the last measured step."""
    settled: list[int] = field(default_factory=list)
    """Members for which the hook's number held at the last step that relied on it."""
    sharded: bool = False
    """Whether there are parameters of which this rank has a part only: parts are what is measured."""
    watchful: bool = False
    """Whether every gradient is read again after every step: a change was seen that the few watched did not show."""
    odd: bool = True
    """Whether the gradients looked unlike those of the step before, at a glance: not finite, far larger or smaller."""
    before: Fingerprints | None = None
    """The gradients that are watched for changes and their versions when they were measured; let go after the step."""
    late: dict[str, Places] = field(default_factory=dict)
    """Row -> slots of what was read again for after the step."""
    _plans: dict[tuple[str, bool], tuple[Plan, FloatLimits, Norms | None, Places]] = field(default_factory=dict)
    _updates: UpdateNorms | None = None
    _settled_at: list[int] = field(default_factory=list)
    """The places of `settled`."""
    _told: float = np.nan
    _spot: int = 0
    _apart: int = field(init=False)
    _witnesses: list[nn.Parameter] = field(init=False)
    _plain: bool | None = None
    """Whether every parameter is there as it is: none is a shard, none still lazy."""

    def __post_init__(self) -> None:
        self.hooked_at = [self.places[member] for member in self.hooked]
        self._apart = max(1, len(self.parameters) // WITNESSES)
        self._witnesses = self.parameters[:: self._apart]

    def still(self, optimizer: Any) -> bool:
        """Whether `optimizer` holds just what it held."""
        groups = optimizer.param_groups
        if self.alive() is not optimizer or len(groups) != len(self.held):
            return False
        for group, held in zip(groups, self.held, strict=True):
            now = group["params"]
            if len(now) != len(held) or not all(map(is_, now, held)):
                return False
        return True

    def gradients(self) -> list[Tensor | None]:
        """The gradients, or of sharded ones the parts that this rank has, as plain tensors."""
        gradients = [parameter.grad for parameter in self.parameters]
        if not self.sharded:
            return gradients
        return [None if gradient is None else local_tensor(gradient) for gradient in gradients]

    def mark(self, gradients: list[Tensor | None]) -> None:
        """Remember which `gradients` were measured: a few of them, which a clipping would change as it does all."""
        self.before = _fingerprints(gradients[:: self._apart])

    def remark(self) -> None:
        """The gradients were changed by ourselves: what is there now is what was meant."""
        if self.before is not None:
            self.before = _fingerprints([parameter.grad for parameter in self._witnesses])

    def changed(self) -> bool:
        """Whether one of the few is another than when it was marked, or was written since; the mark is let go."""
        before, self.before = self.before, None
        if before is None or self.sharded:
            return before is None  # torch does not count what is written to the parts of a DTensor
        gradients, versions = before
        now, versions_now = _fingerprints([parameter.grad for parameter in self._witnesses])
        return not all(map(is_, now, gradients)) or versions != versions_now

    def weights(self) -> Sequence[Tensor | None]:
        """The weights, or of sharded ones the parts that this rank has; None for lazy ones."""
        if self._plain is None:
            self._plain = not self.sharded and not any(map(is_lazy, self.parameters))
        return (
            self.parameters
            if self._plain
            else [None if is_lazy(p) else local_tensor(p.detach()) for p in self.parameters]
        )

    def replan(self) -> None:
        """Other gradients are there than last time: the plans no longer fit."""
        self._plans.clear()

    def release(self) -> None:
        """Drop what was kept for after the step."""
        self.late, self.before = {}, None
        if self._updates is not None:
            self._updates.drop()

    def reduce(
        self,
        buffer: DeviceBuffer,
        row: str,
        tensors: Sequence[Tensor | None],
        *,
        reduction: Reduction = NORM,
        hooked: Sequence[int] = (),
    ) -> Places:
        """Reduce `tensors`, one per member, into `row` of the slab; the slot of each parameter.

        `hooked`: members whose number their hook has put into the row already.
        """
        if hooked and hooked != self.settled:
            self.settled, self._settled_at = list(hooked), [self.places[member] for member in hooked]
            self._plans.pop((row, True), None)
        made = self._plans.get((row, bool(hooked)))
        if made is not None:
            enabled = torch.is_grad_enabled()
            _set_grad_enabled(False)
            try:
                made[0].run(tensors)
            except (TypeError, RuntimeError, UserWarning):
                made = None  # another shape, layout or dtype than last time: plan for what is there now
            finally:
                _set_grad_enabled(enabled)
        if made is None:
            tensors = [tensor if tensor is None else tensor.detach() for tensor in tensors]
            plan = Plan(tensors, buffer[row], reduction=reduction, skip=frozenset(hooked))
            plan.run(tensors)
            index = np.full(buffer.places, -1, dtype=np.intp)
            index[[self.places[member] for member in plan.positions]] = np.arange(len(plan.positions))
            if hooked:
                index[self._settled_at] = buffer.places + np.array(self._settled_at, dtype=np.intp)
            sizes = [_numel(tensors[member]) for member in plan.positions]
            made = self._plans[row, bool(hooked)] = plan, FloatLimits(sizes), buffer.view(row, len(sizes)), index
        plan, limits, norms, index = made
        if reduction is NORM:
            told = limits.recompute(norms, lambda slot: tensors[plan.positions[slot]])
            if row == "grad_norm":
                if hooked and (view := buffer.view(row)) is not None:
                    inside = view[buffer.places :].tolist()
                    told += sum([inside[place] for place in self._settled_at])
                self.odd, self._told = not self._told / ODD <= told <= self._told * ODD < np.inf, told
        return index

    def contradicts(self, buffer: DeviceBuffer, settled: Sequence[int], index: Places) -> bool:
        """Whether what was read at the step, where `index` says, is not what the hooks of members `settled` told."""
        norms = buffer.view("grad_norm")
        if not settled or norms is None:
            return False
        places = np.array([self.places[member] for member in settled], dtype=np.intp)
        read, told = norms[index[places]], norms[buffer.places + places]
        return not np.all(np.abs(read - told) <= DISAGREE * told)

    def contradicted(self, buffer: DeviceBuffer, settled: Sequence[int], gradients: Sequence[Tensor | None]) -> bool:
        """Whether one of `gradients`, another one each time, is not what the hook of its member, of `settled`, told."""
        norms = buffer.view("grad_norm")
        if not settled or norms is None:
            return False
        self._spot = (self._spot + 1) % len(settled)
        member = settled[self._spot]
        if (gradient := gradients[member]) is None:
            return True
        norm_into(gradient.detach(), buffer.spare["grad_norm"])
        read, told = float(norms[buffer.places - 1]), float(norms[buffer.places + self.places[member]])
        return not abs(read - told) <= DISAGREE * told

    @torch.no_grad()
    def copy_weights(self, buffer: DeviceBuffer) -> None:
        """Keep the weights for `moved`."""
        if self._updates is None:
            # by the largest part that any rank has, so that all ranks copy the same parameters
            sizes = [(0 if is_lazy(p) else largest_part(p), p.element_size()) for p in self.parameters]
            self._updates = UpdateNorms(sizes)
        self._updates.keep(self.weights(), buffer)

    def moved(self, buffer: DeviceBuffer) -> dict[str, Places]:
        """Norms of how far the copied weights have moved since; the copies are let go."""
        if self._updates is None or not self._updates.kept:
            return {}
        with torch.no_grad():
            members = self._updates.moved(self.weights())
        if not members:
            return {}
        index = np.full(buffer.places, -1, dtype=np.intp)
        index[[self.places[member] for member in members]] = np.arange(len(members))
        return {ROW: index}


def _fingerprints(gradients: list[Tensor | None]) -> Fingerprints:
    try:
        return gradients, [gradient._version for gradient in gradients if gradient is not None]
    except RuntimeError:  # one was made in inference mode
        return gradients, [version_of(gradient) for gradient in gradients if gradient is not None]


def parameters_of(optimizer: Any) -> list[list[nn.Parameter]]:
    """All parameters, group by group."""
    return [list(group["params"]) for group in optimizer.param_groups]


def codes(
    parameters: Sequence[nn.Parameter], holdings: Iterable[OptimizerParameters], holding: OptimizerParameters
) -> Codes:
    """One `Missing` for each of all `parameters` at a step of the optimizer that has `holding`, one of `holdings`."""
    found = np.array(list(map(_idle, parameters)), dtype=np.int8)
    for other in holdings:
        if other.alive() is not None:
            found[other.places] = Missing.OTHER_OPTIMIZER
    assert holding.absent is not None, "its gradients were looked at"
    for place, parameter, none in zip(holding.places, holding.parameters, holding.absent, strict=True):
        code = Missing.NO_GRADIENT if parameter.requires_grad else Missing.FROZEN
        found[place] = (Missing.LAZY if is_lazy(parameter) else code) if none else Missing.MEASURED
    return found


def _idle(parameter: nn.Parameter) -> Missing:
    """Why one that no optimizer holds has no number."""
    if parameter is REMOVED:
        return Missing.UNMEASURABLE
    return Missing.NO_OPTIMIZER if parameter.requires_grad else Missing.FROZEN


def _numel(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel()
