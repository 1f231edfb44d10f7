"""Tensor hooks on parameters: on some sampled steps each gradient is measured as it arrives, before it is added up."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock
from time import perf_counter

import torch
from torch import Tensor, distributed, nn

from gradwatch.hooks.garbage_collector import no_collections
from gradwatch.hooks.hook_set import HookSet, after_backward, backward_pass, is_hooked_by_others, is_tracing
from gradwatch.measure.device_buffer import host_view
from gradwatch.measure.devices import moved, widest_type
from gradwatch.measure.dtensor import is_dtensor
from gradwatch.measure.layers import is_lazy
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.reductions import Plan, exact_norm, is_vmapped, may_be_lost, norm_into


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
        gradient, slot = gradient.detach() if gradient.requires_grad else gradient, self.slots[place]
        norm_into(gradient, slot)
        seen = host_view(slot)
        if seen is not None and may_be_lost(float(seen), gradient.numel()):
            slot.copy_(exact_norm(gradient))
        self.full[place] = True

    def add_up(self) -> None:
        if any(self.full):
            self.squares += self.norms.to(self.wide).square_()
            self.norms.zero_()
            self.full = bytearray(len(self.full))

    @torch.no_grad()
    def add_pass(self, places: list[int], gradients: list[Tensor]) -> None:
        """Add the squares of `gradients`, those of the parameters at `places`."""
        known = self._plan if self._plan is not None and self._plan[0] == places else None
        try:
            if known is not None:
                known[1].run(gradients)
        except (TypeError, RuntimeError):
            known = None  # another shape, layout or type than last time
        if known is None:
            plan = Plan(gradients, self._together)
            plan.run(gradients)
            index = torch.tensor([places[position] for position in plan.positions], device="cpu")
            known = self._plan = places, plan, moved(index, self.squares.device)
        index = known[2]
        self.squares.index_add_(0, index, self._together[: len(index)].to(self.wide).square_())


@dataclass(slots=True, eq=False)
class _Arrivals:
    """What the hooks have measured; they hold it and nothing else."""

    parameters: Sequence[weakref.ref[nn.Parameter]]
    loss_pass: LossPass
    errors: list[Exception]
    """What a hook failed with: raised there, it would end the user's backward pass."""
    devices: dict[torch.device, _DeviceSquares] = field(default_factory=dict)
    at_once: set[int] = field(default_factory=set)
    """The parameters whose `grad` somebody may write to before the backward pass has ended, or take away."""
    places: set[int] = field(default_factory=set)
    """The parameters at which a gradient has arrived since they were last taken."""
    pending: list[int] = field(default_factory=list)
    """Those to which one has come in this backward pass, where none lay; the threads of several devices add to it."""
    backward: int = -1
    """The backward pass whose end is waited for."""
    passes: int = 0
    """The backward passes since `places` were last taken, as far as hooks can tell; several, at least, where a gradient
    was measured by its hook."""
    seconds: float = 0.0
    lock: RLock = field(default_factory=RLock)

    def wait(self, backward: int) -> None:
        """Have `finish_pass` called at the end of this backward pass; the threads of several devices may ask."""
        with self.lock:
            if backward == self.backward:
                return
            self._measure_pending()  # of a pass in which this one runs (reentrant checkpoints), or that failed
            after_backward(self.finish_pass)
            self.backward = backward
            self.passes += 1

    def finish_pass(self) -> None:
        begun = perf_counter()
        self.backward = -1
        try:
            self._measure_pending()
        except Exception as error:
            self.errors.append(error)
        self.seconds += perf_counter() - begun

    def _measure_pending(self) -> None:
        pending, self.pending = self.pending, []
        arrived: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
        for place in pending:
            parameter = self.parameters[place]()
            # torch.autograd.grad returns gradients, and they have arrived nowhere
            if parameter is not None and (gradient := parameter.grad) is not None:
                places, gradients = arrived.setdefault(gradient.device, ([], []))
                places.append(place)
                gradients.append(gradient)
        for device, (places, gradients) in arrived.items():
            self.on(device).add_pass(places, gradients)
            self.places.update(places)

    def on(self, device: torch.device) -> _DeviceSquares:
        found = self.devices.get(device)
        if found is None:
            with self.lock:
                found = self.devices.setdefault(device, _DeviceSquares(device, len(self.parameters)))
        return found

    def measure(self, gradient: Tensor, place: int) -> None:
        """A gradient has come to the parameter at `place` where another lies, or may not stay there."""
        self.passes += 2
        weight, on_device = self.parameters[place](), self.on(gradient.device)
        if place in self.pending and weight is not None and weight.grad is not None:
            self.pending.remove(place)  # its gradient comes in parts
            on_device.add(weight.grad, place)
        on_device.add(gradient, place)
        self.places.add(place)


@dataclass(slots=True, eq=False)
class _ParameterHook:
    """The hook of one parameter: one object, where a closure of as much is seven."""

    arrivals: _Arrivals
    place: int
    __torch_unserializable__: bool = field(init=False)
    """What `unserializable_hook` sets."""

    def __call__(self, gradient: Tensor | None) -> None:
        arrivals, place = self.arrivals, self.place
        if is_tracing() or gradient is None or not arrivals.loss_pass.begun:
            return
        begun = perf_counter()
        try:
            weight = arrivals.parameters[place]()
            if weight is not None and weight.grad is None and place not in arrivals.at_once:
                if (backward := backward_pass()) != arrivals.backward:
                    arrivals.wait(backward)
                arrivals.pending.append(place)
            elif not is_vmapped(gradient):
                arrivals.measure(gradient, place)
        except Exception as error:
            arrivals.errors.append(error)
        arrivals.seconds += perf_counter() - begun


class ParameterHooks:
    """Owns the hooks. They are on every parameter at the samples that a run begins with, later at some or all of them,
    and off between.

    They see (S / N) g_i, the gradient g_i of one micro-batch on this rank, for a loss scale S and N micro-batches a
    step. The squares of n passes add up to `sum` = (S / N)^2 times those of all |g_i|: their mean, of which the noise
    scale is made, is N^2 `sum` / (n S^2).
    That holds where each pass reaches each hook once, not where a gradient comes in parts (reentrant checkpoints that
    share parameters). The parts of a sharded parameter have no hooks: torch never calls them.
    """

    def __init__(self, errors: list[Exception], loss_pass: LossPass) -> None:
        """`errors`: where what goes wrong inside a hook is put."""
        self.hooks = HookSet()
        self.armed = False
        """Whether the hooks are on."""
        self._several = True
        """Whether a parameter may have got several gradients in the last step that was measured, as far as is known."""
        self._parameters: Sequence[nn.Parameter] = ()
        self._arrivals = _Arrivals((), loss_pass, errors)
        self._made: list[_ParameterHook] = []
        """The hooks of those parameters that can have one."""

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on the hooks are for `parameters`, each of them once; their places are those of what is measured."""
        armed = self.armed
        self.disarm()
        before = self._arrivals
        arrivals = _Arrivals([weakref.ref(one) for one in parameters], before.loss_pass, before.errors)
        self._arrivals, self._parameters = arrivals, parameters
        self._made = [
            _ParameterHook(arrivals, place)
            for place, parameter in enumerate(parameters)
            if type(parameter) is nn.Parameter or not (is_lazy(parameter) or is_dtensor(parameter))
        ]
        if armed:
            self.arm()

    def arm(self, *, whole_sample: bool = True) -> None:
        """Put the hooks on, frozen parameters too, if this sample is to have them; twice does nothing.

        `whole_sample`: as `SamplingSchedule.is_whole_sample` says.
        """
        # where each parameter gets one gradient in a step, `p.grad` says as much
        if self.armed or not (self._several or whole_sample):
            return
        self.armed, arrivals = True, self._arrivals
        arrivals.places.clear()
        arrivals.passes = 0
        for on_device in arrivals.devices.values():
            on_device.add_up()
            on_device.squares.zero_()
        # ranks may write into gradients before the backward pass has ended
        ranks = distributed.is_available() and distributed.is_initialized()
        arrivals.at_once = set()
        try:
            with no_collections():
                for hook in self._made:
                    parameter = self._parameters[hook.place]
                    if ranks or is_hooked_by_others(parameter):
                        arrivals.at_once.add(hook.place)
                    if not parameter.is_meta:
                        self.hooks.on_gradient(parameter, hook)
        except BaseException:
            self.disarm()
            raise

    def disarm(self) -> None:
        """Take the hooks off; twice does nothing."""
        self.armed = False
        self.hooks.remove()

    def take(self, places: Sequence[int], device: torch.device) -> tuple[Tensor, list[bool]] | None:
        """For the parameters at `places`, at a sampled step: the sums of the squared norms of what has arrived since
        `arm` or the last `take`, on `device`, shape [n], and whether anything has. None where nothing has at any of
        them.
        """
        arrivals = self._arrivals
        arrived = [place in arrivals.places for place in places]
        if not any(arrived):
            return None
        self._several, arrivals.passes = arrivals.passes > 1, 0
        arrivals.places.difference_update(places)
        total: Tensor | None = None
        for on_device in arrivals.devices.values():
            on_device.add_up()
            index = moved(torch.tensor(places, dtype=torch.int64, device="cpu"), on_device.squares.device)
            squares = moved(on_device.squares[index], device)
            total = squares if total is None else total + squares
            on_device.squares.index_fill_(0, index, 0.0)
        assert total is not None, "something has arrived"
        return total, arrived

    def have_arrived(self, places: Sequence[int]) -> bool:
        """Whether the hooks are on, and a gradient has come to a parameter at one of `places` since the last `take`."""
        return self.armed and not self._arrivals.places.isdisjoint(places)

    def take_seconds(self) -> float:
        """What the hooks have cost since this was last asked."""
        seconds, self._arrivals.seconds = self._arrivals.seconds, 0.0
        return seconds
