"""Tensor hooks on parameters: on sampled steps each gradient is measured as it arrives, before it is added up."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from time import perf_counter

import torch
from torch import Tensor, distributed, nn

from gradwatch.hooks.garbage_collector import no_collections
from gradwatch.hooks.hook_set import (
    HookSet,
    after_backward,
    backward_pass,
    is_capturing,
    is_hooked_by_others,
)
from gradwatch.measure.devices import moved
from gradwatch.measure.dtensor import is_dtensor
from gradwatch.measure.layers import is_lazy
from gradwatch.measure.reductions import Plan, is_vmapped, norm_into, widest_type


class _DeviceSquares:
    """What arrives on one device. Devices have threads of their own in a backward pass, so they share nothing.

    A gradient that comes where none lies is `p.grad` when the pass ends, and those of a pass are then measured together
    (`add_pass`). Any other is measured by its hook, which only writes its parameter's slot, one kernel; the slots are
    added up when a second gradient comes to one.
    """

    def __init__(self, device: torch.device, places: int) -> None:
        self.wide = widest_type(device)
        self.squares = torch.zeros(places, dtype=self.wide, device=device)
        self.norms = torch.zeros(places, dtype=torch.float32, device=device)
        self.full = bytearray(places)
        self.pending: list[int] = []
        """Parameters to which a gradient has come in this backward pass, where none lay."""
        self._together = torch.zeros(places, dtype=torch.float32, device=device)
        self._plan: tuple[list[int], Plan, Tensor] | None = None
        """The parameters of the last pass, how they are reduced, and where their squares go."""

    @cached_property
    def slots(self) -> tuple[Tensor, ...]:
        """Of `norms`: made where a gradient is measured by its hook, and mostly none is."""
        return self.norms.unbind()

    def add(self, gradient: Tensor, place: int) -> None:
        if self.full[place]:
            self.add_up()
        norm_into(gradient.detach() if gradient.requires_grad else gradient, self.slots[place])
        self.full[place] = True

    def add_up(self) -> None:
        if any(self.full):
            self.squares += self.norms.to(self.wide).square_()
            self.norms.zero_()
            self.full = bytearray(len(self.full))

    @torch.no_grad()
    def add_pass(self, places: list[int], gradients: list[Tensor]) -> None:
        """Add the squares of `gradients`, those of the parameters at `places`."""
        known = self._plan
        if known is not None and known[0] == places:
            try:
                known[1].run(gradients)
            except (TypeError, RuntimeError):
                known = None  # another shape, layout or type than last time
        else:
            known = None
        if known is None:
            plan = Plan(gradients, self._together)
            plan.run(gradients)
            index = torch.tensor([places[position] for position in plan.positions])
            known = self._plan = places, plan, moved(index, self.squares.device)
        index = known[2]
        self.squares.index_add_(0, index, self._together[: len(index)].to(self.wide).square_())


@dataclass(slots=True, eq=False)
class _Arrivals:
    """What the hooks have measured; they hold it and nothing else."""

    devices: dict[torch.device, _DeviceSquares] = field(default_factory=dict)
    parameters: Sequence[weakref.ref[nn.Parameter]] = ()
    places: set[int] = field(default_factory=set)
    """The parameters at which a gradient has arrived since they were last taken."""
    backward: int = -1
    """The backward pass whose end is waited for."""
    seconds: float = 0.0
    errors: list[Exception] = field(default_factory=list)
    """What a hook failed with: raised there, it would end the user's backward pass."""
    lock: Lock = field(default_factory=Lock)

    def wait(self, backward: int) -> None:
        """Have `finish_pass` called at the end of this backward pass; the threads of several devices may ask."""
        with self.lock:
            if backward == self.backward:
                return
            for on_device in self.devices.values():
                on_device.pending.clear()  # of a pass that failed
            after_backward(self.finish_pass)
            self.backward = backward

    def finish_pass(self) -> None:
        begun = perf_counter()
        self.backward = -1
        try:
            for on_device in self.devices.values():
                pending, on_device.pending = on_device.pending, []
                places: list[int] = []
                gradients: list[Tensor] = []
                for place in pending:
                    parameter = self.parameters[place]()
                    # torch.autograd.grad returns gradients, and they have arrived nowhere
                    if parameter is not None and parameter.grad is not None:
                        places.append(place)
                        gradients.append(parameter.grad)
                if places:
                    on_device.add_pass(places, gradients)
                    self.places.update(places)
        except Exception as error:
            self.errors.append(error)
        self.seconds += perf_counter() - begun


@dataclass(slots=True, eq=False)
class _ParameterHook:
    """The hook of one parameter: one object, where a closure of as much is nine."""

    arrivals: _Arrivals
    on_device: _DeviceSquares
    place: int
    at_once: bool
    """Whether somebody may write into `p.grad` before the backward pass has ended, or take it away."""
    __torch_unserializable__: bool = True
    """What `unserializable_hook` sets."""

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None or (gradient.is_cuda and is_capturing()):
            return
        begun, arrivals, on_device, place = perf_counter(), self.arrivals, self.on_device, self.place
        try:
            weight = arrivals.parameters[place]()
            if not self.at_once and weight is not None and weight.grad is None:
                if (backward := backward_pass()) != arrivals.backward:
                    arrivals.wait(backward)
                on_device.pending.append(place)
            elif not is_vmapped(gradient):
                if place in on_device.pending and weight is not None and weight.grad is not None:
                    on_device.pending.remove(place)  # its gradient comes in parts
                    on_device.add(weight.grad, place)
                on_device.add(gradient, place)
                arrivals.places.add(place)
        except Exception as error:
            arrivals.errors.append(error)
        arrivals.seconds += perf_counter() - begun


class ParameterHooks:
    """Owns the hooks. They are on every parameter at fit start and at each sampled step, and off between.

    They see (S / N) g_i, the gradient g_i of one micro-batch on this rank, for a loss scale S and N micro-batches a
    step. The squares of n passes add up to `sum` = (S / N)^2 times those of all |g_i|: their mean, of which the noise
    scale is made, is N^2 `sum` / (n S^2).
    That holds where each pass reaches each hook once, not where a gradient comes in parts (reentrant checkpoints that
    share parameters). The parts of a sharded parameter have no hooks: torch never calls them.
    """

    def __init__(self, errors: list[Exception]) -> None:
        """`errors`: where what goes wrong inside a hook is put."""
        self.hooks = HookSet()
        self.armed = False
        """Whether the hooks are on."""
        self._parameters: Sequence[nn.Parameter] = ()
        self._arrivals = _Arrivals(errors=errors)

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on the hooks are for `parameters`; their places in it are those of what is measured."""
        armed = self.armed
        self.disarm()
        references = [weakref.ref(parameter) for parameter in parameters]
        self._parameters = parameters
        self._arrivals = _Arrivals(parameters=references, errors=self._arrivals.errors)
        if armed:
            self.arm()

    @no_collections()
    def arm(self) -> None:
        """Put the hooks on, frozen parameters too; twice does nothing."""
        if self.armed:
            return
        self.armed, arrivals = True, self._arrivals
        arrivals.places.clear()
        for on_device in arrivals.devices.values():
            on_device.add_up()
            on_device.squares.zero_()
        # ranks may write into gradients before the backward pass has ended
        at_once = distributed.is_available() and distributed.is_initialized()
        hooked: set[int] = set()
        try:
            for place, parameter in enumerate(self._parameters):
                if id(parameter) in hooked or parameter.is_meta:
                    continue
                if type(parameter) is not nn.Parameter and (is_lazy(parameter) or is_dtensor(parameter)):
                    continue
                hooked.add(id(parameter))
                device = parameter.device
                if (there := arrivals.devices.get(device)) is None:
                    there = arrivals.devices[device] = _DeviceSquares(device, len(self._parameters))
                written = at_once or is_hooked_by_others(parameter)
                self.hooks.on_gradient(parameter, _ParameterHook(arrivals, there, place, at_once=written))
        except BaseException:
            self.disarm()
            raise

    def disarm(self) -> None:
        """Take the hooks off; twice does nothing."""
        self.armed = False
        self.hooks.remove()

    def take(self, places: Sequence[int], device: torch.device) -> tuple[Tensor, list[bool]] | None:
        """For the parameters at `places`: the sums of the squared norms of what has arrived since `arm` or the last
        `take`, on `device`, shape [n], and whether anything has. None where nothing has at any of them.
        """
        arrivals = self._arrivals
        arrived = [place in arrivals.places for place in places]
        if not any(arrived):
            return None
        arrivals.places.difference_update(places)
        total: Tensor | None = None
        for on_device in arrivals.devices.values():
            on_device.add_up()
            index = moved(torch.tensor(places, dtype=torch.int64), on_device.squares.device)
            squares = moved(on_device.squares[index], device)
            total = squares if total is None else total + squares
            on_device.squares.index_fill_(0, index, 0.0)
        assert total is not None, "something has arrived"
        return total, arrived

    def take_seconds(self) -> float:
        """What the hooks have cost since this was last asked."""
        seconds, self._arrivals.seconds = self._arrivals.seconds, 0.0
        return seconds
