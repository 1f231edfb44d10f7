"""The parameters' taps: gradients, weights and updates into the slab. Decides where each number is true."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.hooks import HookSet, dispatch_cost
from gradwatch.layers import Layer, find_layers, lay_out, lazy
from gradwatch.reading import Codes, Places, Reading, site_codes
from gradwatch.record import Layout, Missing
from gradwatch.slab import Parcel, Slab, on_host
from gradwatch.stats import NORM, SAFE_SQUARE, ZEROS, Plan, Reduction, exact_norm

HOOKED = range(16_384, 4_194_305)
"""Elements of the gradients that are measured inside their hooks, still in cache (measured: docs/performance.md)."""

COPY_BYTES = 64 * 2**20
"""Weights copied on a sampled step for `update_ratio`; in larger models the parameters take turns. Judgement."""

_ROWS = ("hooked", "grad_norm", "zeros", "weights", "grad_norm_clipped", "copied", "updates")

_version = attrgetter("_version")
"""How often a tensor was written in place. Private in name, but the one way torch offers; test_probe guards it."""

Fingerprints = tuple[list[int], list[int]]


@dataclass(slots=True, eq=False)
class _Group:
    """The watched parameters of one optimizer, and how their numbers are had."""

    number: int
    held: list[nn.Parameter]
    """All that the optimizer holds, to see when that changes."""
    places: Places
    """Where its watched parameters stand in `Probe.parameters`."""
    parameters: list[nn.Parameter]
    place_list: list[int]
    hooked: list[int]
    """Members whose gradients are measured inside their hooks."""
    absent: list[bool] | None = None
    settled: list[int] = field(default_factory=list)
    """Members whose hook measured the gradient at the last step: the others' are planned for."""
    plans: dict[str, Plan] = field(default_factory=dict)
    owners: dict[str, Places] = field(default_factory=dict)
    """Row -> the parameter of each slot its plan writes."""
    codes: Codes = field(default_factory=lambda: np.empty(0, dtype=np.int8))
    before: Fingerprints | None = None
    """The gradients as they were when they were measured: address and version of each."""
    copies: list[tuple[int, Tensor, float]] = field(default_factory=list)
    """Member, its weights before the step or a sample of them, and what scales their norm to all elements."""


class Probe:
    """Owns the parameter hooks, and reads what they and the optimizers' parameters hold."""

    def __init__(self, model: nn.Module, patterns: Sequence[str], *, direct: bool) -> None:
        """`direct`: whether in this mode what a tensor hook sees can be the optimizer's gradient at all."""
        self.model = model
        self.patterns = tuple(patterns)
        self.direct = direct
        self.hooks = HookSet()
        self.layers: list[Layer] = []
        self.parameters: list[nn.Parameter] = []
        self.layout = Layout(())
        self._place: dict[int, int] = {}
        self._fired: list[int] = []
        self._marks: list[tuple[int, int] | None] = []
        self._groups: dict[int, _Group] = {}
        self._callbacks: dict[int, Callable[[Tensor | None], None]] = {}
        self._dispatch = 0.0
        self._turn = 0
        self.waiting = False
        """Whether lazy parameters have not been materialised yet."""
        self.rescan()

    def arm(self) -> None:
        """Put a hook on every parameter, frozen ones too; once."""
        if len(self.hooks):
            return
        self._fired = [0] * len(self.parameters)
        self._marks = [None] * len(self.parameters)
        self._callbacks = {
            place: self._hook(place, parameter)
            for place, parameter in enumerate(self.parameters)
            if not lazy(parameter)
        }
        try:
            for place, callback in self._callbacks.items():
                self.hooks.on_gradient(self.parameters[place], callback)
        except BaseException:
            self.disarm()
            raise

    def disarm(self) -> None:
        self.hooks.remove()

    def detach(self) -> None:
        """Let go of everything that is the user's."""
        self.disarm()
        self._groups.clear()
        self._place.clear()
        self._callbacks.clear()
        self.parameters, self.layers, self.model = [], [], nn.Module()

    def rescan(self) -> tuple[str, ...]:
        """Look through the model again; names of parameters that are new, replaced or materialised since."""
        before = dict(zip(self.layout.names(self.layout.parameters), self.parameters, strict=True))
        self.layers = find_layers(self.model, self.patterns)
        self.waiting = any(lazy(parameter) for layer in self.layers for _, parameter in layer.parameters)
        found = {name: parameter for layer in self.layers for name, parameter in layer.parameters}
        sizes = {name: self.layout.sites[self.layout.index[name]].numel for name in before}
        adopted = tuple(
            name for name, p in found.items() if before.get(name) is not p or (not lazy(p) and p.numel() != sizes[name])
        )
        if not adopted:
            return ()
        modules = frozenset(type(module).__name__ for module in self.model.modules())
        self.layout = lay_out(self.layers, before=self.layout, modules=modules)
        now = {**before, **found}
        self.parameters = [now[name] for name in self.layout.names(self.layout.parameters)]
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._sizes = np.array([0 if lazy(p) else p.numel() for p in self.parameters], dtype=np.float64)
        self._slab = Slab(_device_of(self.parameters), len(self.parameters), _ROWS)
        self._groups.clear()
        if len(self.hooks):
            self.disarm()
            self.arm()
        return adopted

    def enlist(self, optimizers: Iterable[Any]) -> tuple[str, ...]:
        """Learn which parameters each optimizer holds now; names of parameters adopted on the way."""
        adopted: tuple[str, ...] = ()
        for optimizer in optimizers:
            held = _parameters_of(optimizer)
            known = self._groups.get(id(optimizer))
            if known and len(known.held) == len(held) and all(map(is_, known.held, held)):
                continue
            if any(id(p) not in self._place for p in held):
                adopted += self.rescan()
            places = np.unique([self._place[id(p)] for p in held if id(p) in self._place]).astype(np.intp)
            members = [self.parameters[place] for place in places]
            hooked = [i for i, p in enumerate(members) if self.direct and _measured_in_hook(p)]
            number = known.number if known else len(self._groups)
            self._groups[id(optimizer)] = _Group(number, held, places, members, places.tolist(), hooked)
            for group in self._groups.values():
                group.absent = None
        return adopted

    def number(self, optimizer: Any) -> int:
        """The optimizer's number, in the order in which they were enlisted."""
        return self._groups[id(optimizer)].number

    def backwards(self, optimizer: Any) -> int:
        """Backward passes since the optimizer's last step, as hooks on its parameters saw them; 0 without hooks."""
        group = self._groups[id(optimizer)]
        if not len(self.hooks):
            return 0
        return max(map(self._fired.__getitem__, group.place_list), default=0)

    def measure(self, optimizer: Any, *, sampled: bool = False, scale: Tensor | None = None) -> Reading:
        """Read the gradients that `optimizer` is about to use. `scale`: a loss scale that is still in them, 0-d."""
        group = self._groups[id(optimizer)]
        gradients = [p.grad for p in group.parameters]
        settled = self._settled(group, gradients)
        absent = [gradient is None for gradient in gradients]
        if absent != group.absent or settled != group.settled or sampled:
            self._replan(group, absent, settled)
        owners = {"grad_norm": self._reduce(group, "grad_norm", gradients, skip=settled)}
        if settled:
            owners["hooked"] = group.places[settled]
        if scale is not None:
            self._slab["grad_norm"].div_(scale)
        if sampled:
            owners["zeros"] = self._reduce(group, "zeros", gradients, reduction=ZEROS)
            owners["weights"] = self._reduce(group, "weights", [_values(p) for p in group.parameters])
            group.copies = self._copies(group)
        reading = Reading(self.layout, group.codes, Parcel({row: self._slab[row] for row in owners}), owners)
        self._recheck(reading, "grad_norm", group, gradients, scale)
        group.before = _fingerprints(gradients)
        self._forget(group)
        return reading

    def measure_after(self, optimizer: Any) -> tuple[bool, Reading | None]:
        """Right after the step: whether the gradients it used are others than those measured; they, and the update."""
        group = self._groups[id(optimizer)]
        copies, group.copies = group.copies, []
        gradients = [p.grad for p in group.parameters]
        changed = group.before is None or _fingerprints(gradients) != group.before
        owners: dict[str, Places] = {}
        if changed and [gradient is None for gradient in gradients] == group.absent:
            owners["grad_norm_clipped"] = self._reduce(group, "grad_norm_clipped", gradients)
        if copies:
            scales = torch.tensor([scale for _, _, scale in copies]).to(self._slab.device, non_blocking=True)
            places = group.places[[member for member, _, _ in copies]]
            old = [copy for _, copy, _ in copies]
            new = [_sample(_values(group.parameters[member])) for member, _, _ in copies]
            for row, tensors in (("copied", old), ("updates", torch._foreach_sub(new, old))):
                plan = Plan(tensors)
                plan.run(tensors, self._slab[row])
                owners[row] = places[plan.positions]
                self._slab[row][: len(old)].mul_(scales[plan.positions])
        if not owners:
            return changed, None
        reading = Reading(self.layout, group.codes, Parcel({row: self._slab[row] for row in owners}), owners)
        if "grad_norm_clipped" in owners:
            self._recheck(reading, "grad_norm_clipped", group, gradients, None)
        return changed, reading

    def hook_seconds(self) -> float:
        """What the parameter hooks cost in one backward pass, seconds: run once more on the gradients at hand."""
        if not len(self.hooks):
            return 0.0
        self._dispatch = self._dispatch or dispatch_cost()
        fired = list(self._fired)
        gradients = [(hook, self.parameters[place].grad) for place, hook in self._callbacks.items()]
        begun = perf_counter()
        for hook, gradient in gradients:
            hook(gradient)
        seconds = perf_counter() - begun
        self._fired[:] = fired
        return seconds + self._dispatch * sum(gradient is not None for _, gradient in gradients)

    def release(self, optimizer: Any) -> None:
        """The step did not happen: drop what was kept for after it."""
        self._groups[id(optimizer)].copies = []

    def _settled(self, group: _Group, gradients: Sequence[Tensor | None]) -> list[int]:
        """THE decision: the members for which what the hook measured is the optimizer's gradient.

        It is if the hook fired exactly once since the optimizer's last step, and `p.grad` is that very tensor, not
        written since. Otherwise (accumulation, several backwards, an edit, another hook, a copy) `p.grad` is read.
        """
        fired, marks, places = self._fired, self._marks, group.place_list
        return [
            i
            for i in group.hooked
            if fired[places[i]] == 1
            and (gradient := gradients[i]) is not None
            and marks[places[i]] == (gradient.data_ptr(), gradient._version)
        ]

    def _hook(self, place: int, parameter: nn.Parameter) -> Callable[[Tensor | None], None]:
        # closures over what they need: the hooks run once per parameter and backward pass, and hold no model
        fired, marks = self._fired, self._marks
        if not (self.direct and _measured_in_hook(parameter)):

            def count(gradient: Tensor | None) -> None:
                fired[place] += 1

            return count
        slot = self._slab["hooked"][place]
        norm = torch.linalg.vector_norm

        def measure(gradient: Tensor | None) -> None:
            fired[place] += 1
            marks[place] = None
            if gradient is None or gradient.dtype is not torch.float32 or gradient.layout is not torch.strided:
                return
            if gradient.requires_grad:
                gradient = gradient.detach()
            norm(gradient, out=slot)
            marks[place] = gradient.data_ptr(), gradient._version

        return measure

    def _forget(self, group: _Group) -> None:
        """Count the backward passes towards the optimizer's next step from zero."""
        if len(group.places) == len(self._fired):
            self._fired[:] = [0] * len(self._fired)
        elif len(self.hooks):
            for place in group.place_list:
                self._fired[place] = 0

    def _replan(self, group: _Group, absent: list[bool], settled: list[int]) -> None:
        if absent != group.absent or settled != group.settled:
            group.plans.clear()
        group.absent, group.settled = absent, settled
        codes = np.empty(len(self.parameters), dtype=np.int8)
        for place, parameter in enumerate(self.parameters):
            codes[place] = self._idle(parameter)
        for other in self._groups.values():
            codes[other.places] = Missing.OTHER_OPTIMIZER
        for place, parameter, none in zip(group.places, group.parameters, absent, strict=True):
            idle = Missing.NO_GRADIENT if parameter.requires_grad else Missing.FROZEN
            codes[place] = (Missing.LAZY if lazy(parameter) else idle) if none else Missing.MEASURED
        group.codes = site_codes(self.layout, codes)

    @staticmethod
    def _idle(parameter: nn.Parameter) -> Missing:
        return Missing.NO_OPTIMIZER if parameter.requires_grad else Missing.FROZEN

    def _reduce(
        self,
        group: _Group,
        row: str,
        tensors: Sequence[Tensor | None],
        *,
        reduction: Reduction = NORM,
        skip: Collection[int] = (),
    ) -> Places:
        """Reduce `tensors`, one per member, into `row`; the parameter of each slot."""
        plan = group.plans.get(row)
        if plan is not None:
            try:
                plan.run(tensors, self._slab[row], reduction)
            except (TypeError, RuntimeError):
                plan = None  # another shape, layout or dtype than last time: plan for what is there now
        if plan is None:
            plan = group.plans[row] = Plan(tensors, skip=frozenset(skip))
            plan.run(tensors, self._slab[row], reduction)
            group.owners[row] = group.places[plan.positions]
        return group.owners[row]

    def _recheck(
        self, reading: Reading, row: str, group: _Group, gradients: Sequence[Tensor | None], scale: Tensor | None
    ) -> None:
        """Have norms that float32 squares cannot hold (0, inf, tiny) again in float64. On the CPU only, at once."""
        if self._slab.device.type != "cpu":
            return
        norms = reading.per_parameter(row)
        doubtful = np.flatnonzero((norms * norms < SAFE_SQUARE * self._sizes) | (norms == np.inf))
        if not len(doubtful):
            return
        member = {place: i for i, place in enumerate(group.place_list)}
        found = torch.stack([exact_norm(_present(gradients[member[place]])) for place in doubtful.tolist()])
        reading.exact = doubtful, on_host(found if scale is None else found / scale)

    def _copies(self, group: _Group) -> list[tuple[int, Tensor, float]]:
        """Weights before the step: all, or as many as `COPY_BYTES` allow, going on where the last turn ended."""
        copies: list[tuple[int, Tensor, float]] = []
        room, count = COPY_BYTES, len(group.parameters)
        for turn in range(count):
            member = (self._turn + turn) % count
            parameter = group.parameters[member]
            if lazy(parameter) or parameter.numel() == 0:
                continue
            sample = _sample(_values(parameter))
            room -= sample.numel() * sample.element_size()
            if room < 0:
                self._turn = member
                break
            copies.append((member, sample.clone(), (parameter.numel() / sample.numel()) ** 0.5))
        return copies


def _sample(weights: Tensor) -> Tensor:
    """All of `weights`, or of a tensor larger than `COPY_BYTES` every k-th element."""
    stride = -(-weights.numel() * weights.element_size() // COPY_BYTES)
    return weights if stride <= 1 else weights.reshape(-1)[::stride]


def _values(parameter: nn.Parameter) -> Tensor:
    return torch.empty(0) if lazy(parameter) else parameter.detach()


def _parameters_of(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _measured_in_hook(parameter: nn.Parameter) -> bool:
    return (
        not lazy(parameter)
        and parameter.numel() in HOOKED
        and parameter.dtype is torch.float32
        and parameter.device.type == "cpu"
    )


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "only a measured gradient has a norm"
    return gradient


def _fingerprints(gradients: Sequence[Tensor | None]) -> Fingerprints | None:
    """Address and version of every gradient; None where a gradient has no address (sparse): always read again."""
    present = [gradient for gradient in gradients if gradient is not None]
    try:
        return list(map(Tensor.data_ptr, present)), list(map(_version, present))
    except RuntimeError:
        return None


def _device_of(parameters: Sequence[nn.Parameter]) -> torch.device:
    """The device that holds most parameters; numbers from others are copied there."""
    devices = [parameter.device for parameter in parameters]
    return max(set(devices), key=devices.count) if devices else torch.device("cpu")
