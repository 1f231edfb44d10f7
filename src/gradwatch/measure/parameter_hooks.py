"""The parameters' tensor hooks: they measure gradients as they are made, and remember what they measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from time import perf_counter

import torch
from torch import Tensor, nn

from gradwatch.core.schedule import Trial
from gradwatch.hooks.hook_set import HookSet, dispatch_cost
from gradwatch.measure.device_buffer import DeviceBuffer
from gradwatch.measure.layers import is_lazy
from gradwatch.measure.reductions import ONE_SUM, norm_into

HOOKED = range(16_384, 4_194_305)
"""Elements of the gradients that may be measured inside their hooks, while they are warm: smaller ones are cheaper
reduced together, larger ones are read from memory at any time (measured: docs/performance.md)."""


TIMED = 8
"""One of so many hooks looks at the clock: twice is a fifth of what a hook takes (measured)."""


Mark = Callable[[], Tensor | None]
"""Gives the gradient that was measured, while it is there, and does not keep it."""


@dataclass(slots=True, eq=False)
class _Passes:
    """What the hooks that look at the clock have seen of the backward passes since the last step."""

    spent: float = 0.0
    """Seconds inside them."""
    begun: float = 0.0
    """When the first of them was called; 0.0 for never."""
    first: int = -1
    """Its place, in this step or one before."""


class ParameterHooks:
    """Hooks on parameters, called when a backward pass has added to `parameter.grad`: what lies there is measured.

    `fired`, `marks` and `spots` say how often each was called, which tensor it measured last, None where it could not,
    and at which address. An address alone would not do: the next tensor may have it.
    """

    def __init__(self, *, inside: bool) -> None:
        self.inside = inside
        """Whether the hooks measure."""
        self.everywhere = True
        """Whether every parameter has a hook, or only those whose hook is for something: a call into Python costs
        1 to 4 us in the middle of a backward pass (measured)."""
        self.hooks = HookSet()
        self.fired: list[int] = []
        self.marks: list[Mark | None] = []
        self.spots: list[int] = []
        self.errors: list[Exception] = []
        """What went wrong inside a hook, where it may not be raised: that would end the user's backward pass."""
        self._parameters: Sequence[nn.Parameter] = ()
        self._buffer: DeviceBuffer | None = None
        self.armed = False
        """Whether the hooks are there, where there are any."""
        self._dispatch = 0.0
        self._passes = _Passes()
        self._own = self._seconds = 0.0
        """What the hooks have cost the last step, and all that `seconds` has not told yet."""
        self._span = 0.0
        """Seconds from the first hook of the last step to the end of its backward passes, 0.0 where there was none."""
        self._trial = Trial()
        self._sizes: list[tuple[int, int, bool]] = []
        """Of the parameters that are measured in hooks: place, elements, whether the hook looks at the clock."""
        self._share = 1.0
        """What those hooks take that look at the clock, of what all take."""
        self._timed = False
        """Whether the span is wanted where hooks do not measure: one notes when it is called."""

    @property
    def measuring(self) -> bool:
        return self.inside and len(self.hooks) > 0

    def over(self, parameters: Sequence[nn.Parameter], buffer: DeviceBuffer | None) -> None:
        """From now on the hooks are for `parameters`, and write into `buffer`."""
        armed = self.armed
        self.disarm()
        self._parameters, self._buffer = parameters, buffer
        if armed:
            self.arm()

    def arm(self) -> None:
        """Put the hooks on, frozen parameters too; twice does nothing."""
        if self.armed:
            return
        self.armed = True
        self.fired = [0] * len(self._parameters)
        self.marks = [None] * len(self._parameters)
        self.spots = [0] * len(self._parameters)
        sizes = {place: p.numel() for place, p in enumerate(self._parameters) if self.inside and measurable_in_hook(p)}
        timed = {*list(sizes)[::TIMED], self._passes.first} if self._passes.first >= 0 else set(sizes)
        self._sizes = [(place, size, place in timed) for place, size in sizes.items()]
        self._share = _share_timed(self._sizes)
        try:
            for place, parameter in enumerate(self._parameters):
                if is_lazy(parameter):
                    continue
                if place in sizes:
                    measures = self._measures(place, timed=place in timed)
                    self.hooks.on_gradient(parameter, measures, accumulated=True)
                if self.everywhere:
                    # does nothing, and runs no Python of ours
                    self.hooks.on_gradient(parameter, partial(next, repeat(None)))
                elif self._timed and place == self._passes.first:
                    self.hooks.on_gradient(parameter, partial(_note, self._passes))
        except BaseException:
            self.disarm()
            raise

    def disarm(self) -> None:
        """Take the hooks off; twice does nothing."""
        if self.armed or len(self.hooks):
            self.armed = False
            self.hooks.remove()
            self.forget(range(len(self.marks)))

    def forget(self, places: Iterable[int]) -> None:
        """What the hooks of `places` have told is no longer wanted."""
        fired, marks = self.fired, self.marks
        for place in places:
            fired[place], marks[place] = 0, None

    def detach(self) -> None:
        """Let go of everything that is the user's."""
        self.disarm()
        self._parameters, self._buffer = (), None

    def switch(self, inside: bool, *, timed: bool = False) -> None:
        """Measure inside the hooks from now on, or not: then there are none, but for one where the span is wanted all
        the same (`timed`).
        """
        if inside != self.inside or timed != self._timed:
            self.inside, self._timed = inside, timed
            self.over(self._parameters, self._buffer)

    def passed(self) -> None:
        """The backward passes of a step are over."""
        begun, self._passes.begun = self._passes.begun, 0.0
        self._span = perf_counter() - begun if begun else 0.0
        spent, self._passes.spent = self._passes.spent, 0.0
        count, share, fired = len(self._sizes), self._share, self.fired
        called = len(fired) - fired.count(0)
        if called < count:
            count, share = called, _share_timed([one for one in self._sizes if fired[one[0]]])
        if count:
            assert self._buffer is not None
            self._buffer.root("grad_norm")
            self._dispatch = self._dispatch or dispatch_cost()
        self._own = spent / share + self._dispatch * count
        self._seconds += self._own

    def try_on(self, *, after: float) -> None:
        """Reading their gradients has taken `after` seconds besides: go on in the way that is cheaper, once known."""
        if not self._trial.over:
            inside = self._trial.choose(self.inside, span=self._span, own=self._own, after=after)
            self.switch(inside, timed=not self._trial.over)

    def thin_out(self) -> None:
        """The first step has been measured: from now on only parameters whose hook is for something have one."""
        if self.everywhere:
            self.everywhere = False
            self.over(self._parameters, self._buffer)

    def seconds(self) -> float:
        """What the hooks have cost since this was last asked, in backward passes that are over."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _measures(self, place: int, *, timed: bool) -> Callable[[nn.Parameter], None]:
        passes = self._passes
        assert self._buffer is not None
        # closures over what they need, which hold no model; they run once per parameter and backward pass, out of a
        # cold cache, and do as little as will do
        fired, marks, spots, errors = self.fired, self.marks, self.spots, self.errors
        slot, weakly = self._buffer.square_slot(place), weakref.ref

        def measure(parameter: nn.Parameter) -> None:
            fired[place] += 1
            marks[place] = None
            gradient = parameter.grad
            try:
                _square_into(gradient, slot)  # type: ignore[arg-type]
                spots[place] = gradient.data_ptr()  # type: ignore[union-attr]
                marks[place] = weakly(gradient)
            except Exception as error:
                if _should_have_one(gradient, slot):
                    errors.append(error)

        def measure_by_the_clock(parameter: nn.Parameter) -> None:
            begun = perf_counter()
            if not passes.begun:
                passes.begun, passes.first = begun, place
            measure(parameter)
            passes.spent += perf_counter() - begun

        return measure_by_the_clock if timed else measure


def _share_timed(hooks: Sequence[tuple[int, int, bool]]) -> float:
    """Of `hooks`, as in `ParameterHooks._sizes`: the share that looks at the clock, by elements; 1.0 for none."""
    return sum([size for _, size, timed in hooks if timed]) / max(1, sum([size for _, size, _ in hooks])) or 1.0


def _square_into(gradient: Tensor, out: Tensor) -> None:
    """Sum of the squares of `gradient`, float32 on the CPU, into the 0-d float32 `out`; whether float32 can hold it is
    the caller's to tell.
    """
    if gradient.numel() <= ONE_SUM and gradient.is_contiguous():
        # with as many sums as registers: as right as the norm, and faster while the gradient is warm (measured)
        flat = gradient.view(-1)
        torch.dot(flat, flat, out=out)
        return
    if gradient.layout is not torch.strided:
        raise TypeError("to sum up a sparse gradient's parts takes long, and is done at the step")
    norm_into(gradient.detach(), out)
    out.square_()


def _should_have_one(gradient: Tensor | None, slot: Tensor) -> bool:
    """Whether a hook can have a norm of it: not where somebody has taken it away, of sparse ones, in graphs, and not
    where the model has gone to another type or device since.
    """
    if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
        return False
    return gradient.dtype is slot.dtype and gradient.device == slot.device


def _note(passes: _Passes, gradient: Tensor | None) -> None:
    if not passes.begun:
        passes.begun = perf_counter()


def measurable_in_hook(parameter: nn.Parameter) -> bool:
    """Whether its gradient may be measured inside its hook."""
    narrow = is_lazy(parameter) or parameter.dtype is not torch.float32 or parameter.device.type != "cpu"
    return not narrow and parameter.numel() in HOOKED
