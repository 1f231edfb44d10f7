"""The parameters' tensor hooks: they measure gradients as they are made, and remember what they measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from time import perf_counter

import torch
from torch import Tensor, nn

from gradwatch.hooks import HookSet, dispatch_cost
from gradwatch.layers import lazy
from gradwatch.slab import Slab
from gradwatch.stats import norm_into, stand_in, version_of

HOOKED = range(16_384, 4_194_305)
"""Elements of the gradients that may be measured inside their hooks, while they are warm: smaller ones are cheaper
reduced together, larger ones are read from memory at any time (measured: docs/performance.md)."""


UNSEEN = 1.8
"""By how much a backward pass is longer for what its hooks take: they push what comes next out of the caches. Measured
on 50 weights of 64K elements: 1.1 to 2.1, on a machine where reading at the step is the better way by 5 % of a step."""


class Taps:
    """Hooks on parameters; `fired` and `marks` say how often each was called, and which tensor it measured last."""

    def __init__(self, *, inside: bool) -> None:
        self.inside = inside
        """Whether the hooks measure."""
        self.everywhere = True
        """Whether every parameter has a hook, or only those whose gradient is measured in it: a call into Python costs
        1 to 4 us in the middle of a backward pass (measured)."""
        self.hooks = HookSet()
        self.fired: list[int] = []
        self.marks: list[tuple[int, int] | None] = []
        self.troubles: list[Exception] = []
        """What went wrong inside a hook, where it may not be raised: that would end the user's backward pass."""
        self._parameters: Sequence[nn.Parameter] = ()
        self._slab: Slab | None = None
        self.armed = False
        """Whether the hooks are there, where there are any."""
        self._dispatch = 0.0
        self._spent = [0.0]

    @property
    def measuring(self) -> bool:
        return self.inside and len(self.hooks) > 0

    def over(self, parameters: Sequence[nn.Parameter], slab: Slab | None) -> None:
        """From now on the hooks are for `parameters`, and write into `slab`."""
        armed = self.armed
        self.disarm()
        self._parameters, self._slab = parameters, slab
        if armed:
            self.arm()

    def arm(self) -> None:
        """Put the hooks on, frozen parameters too; twice does nothing."""
        if self.armed:
            return
        self.armed = True
        self.fired = [0] * len(self._parameters)
        self.marks = [None] * len(self._parameters)
        try:
            for place, parameter in enumerate(self._parameters):
                if (hook := self._hook(place, parameter)) is not None:
                    self.hooks.on_gradient(parameter, hook)
        except BaseException:
            self.disarm()
            raise

    def disarm(self) -> None:
        """Take the hooks off; twice does nothing."""
        if self.armed or len(self.hooks):
            self.armed = False
            self.hooks.remove()

    def detach(self) -> None:
        """Let go of everything that is the user's."""
        self.disarm()
        self._parameters, self._slab = (), None

    def switch(self, inside: bool) -> None:
        """Measure inside the hooks from now on, or not: then there are none."""
        if inside != self.inside:
            self.inside = inside
            self.over(self._parameters, self._slab)

    def thin_out(self) -> None:
        """The first step has been measured: from now on only parameters that are measured in their hook have one."""
        if self.everywhere:
            self.everywhere = False
            self.over(self._parameters, self._slab)

    def seconds(self) -> float:
        """What the hooks have cost since this was last asked, for one backward pass between."""
        if len(self.hooks):
            self._dispatch = self._dispatch or dispatch_cost()
        spent, self._spent[0] = self._spent[0], 0.0
        return spent + self._dispatch * len(self.hooks)

    @property
    def felt_seconds(self) -> float:
        """What the hooks have cost the backward pass since `seconds` was last asked, without asking: by estimate."""
        return UNSEEN * (self._spent[0] + self._dispatch * len(self.hooks))

    def _hook(self, place: int, parameter: nn.Parameter) -> Callable[[Tensor | None], None] | None:
        if not (self.inside and measurable_in_hook(parameter)):
            # does nothing, and runs no Python of ours
            return partial(next, repeat(None)) if self.everywhere and not lazy(parameter) else None
        assert self._slab is not None
        # closures over what they need: they run once per parameter and backward pass, and hold no model
        fired, marks, spent, troubles = self.fired, self.marks, self._spent, self.troubles
        slot = self._slab.hook_slot("grad_norm", place)

        def measure(gradient: Tensor | None) -> None:
            begun = perf_counter()
            fired[place] += 1
            marks[place] = None
            try:
                if gradient is not None and gradient.layout is torch.strided and not gradient.requires_grad:
                    norm_into(gradient, slot)
                    marks[place] = gradient.data_ptr(), version_of(gradient)
            except Exception as error:
                if not (gradient is not None and stand_in(gradient)):  # asked only here: this runs at every step
                    troubles.append(error)
            spent[0] += perf_counter() - begun

        return measure


def measurable_in_hook(parameter: nn.Parameter) -> bool:
    """Whether its gradient may be measured inside its hook."""
    narrow = lazy(parameter) or parameter.dtype is not torch.float32 or parameter.device.type != "cpu"
    return not narrow and parameter.numel() in HOOKED
