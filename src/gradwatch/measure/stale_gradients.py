"""Whether gradients of the previous step were not cleared before the backward pass added new ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwatch.hooks.hook_set import HookSet, is_tracing
from gradwatch.measure.dtensor import is_dtensor
from gradwatch.measure.layers import is_lazy, smallest_of_parts
from gradwatch.measure.reductions import dense_real, is_vmapped, joined, version_of, wide_norm

STALE_CHECKS = 4
"""Parameters that show for all of an optimizer: clearing knows no exceptions. Judgement."""

TRUSTED = 3
"""Steps in a row that found no gradient there, after which no hooks are needed. Judgement."""

LARGEST = 65_536
"""Elements of a checked parameter at most, where there are smaller ones: its norms take a few us. Judgement."""


@dataclass(slots=True, eq=False)
class _CheckedParameter:
    """What the hooks of one parameter have seen since the last step."""

    parameter: weakref.ref[nn.Parameter]
    last: weakref.ref[Tensor] | None
    """Its gradient when the last step was over."""
    weight_version: int
    """How often the weights had been written before that step."""
    gradient_version: int | None = None
    """How often the gradient had been written when the step was over; None where that is not known."""
    cleared: bool = False
    """Whether a backward pass found no gradient there, or zeros."""
    gone: bool = False
    """Whether it found none."""
    added: bool = False
    """Whether one was accumulated."""
    old: Tensor | None = None
    """The least norm that any of them found there, 0-d."""
    new: Tensor | None = None
    """The largest norm that any of them brought, 0-d."""

    @property
    def gradient(self) -> Tensor | None:
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    def remember(self) -> Tensor | None:
        """Have the present gradient be the `last`; that one."""
        gradient = self.gradient
        self.last = None if gradient is None else weakref.ref(gradient)
        return gradient

    def begin(self) -> None:
        self.cleared = self.gone = self.added = False
        self.old = self.new = self.gradient_version = None
        self.weight_version = _version(self.parameter())


class StaleGradientCheck:
    """Looks at a few parameters of one optimizer.

    A gradient that was cleared is None or zero, however it was cleared, when the first backward pass of a step reaches
    its parameter: hooks see it. After `TRUSTED` steps at which they found None, as `zero_grad` leaves it, they come
    off, and each step only checks that `.grad` is another tensor than after the last one. If it is not, they go back
    on.
    """

    def __init__(self, errors: list[Exception]) -> None:
        """`errors`: where what goes wrong inside a hook is put."""
        self.hooks = HookSet()
        self._errors = errors
        self._checked: list[_CheckedParameter] = []
        self.hooked = True
        """Whether hooks look on."""
        self._updates_known, self._clean = False, 0
        self._written = False
        """Whether the optimizer is known to have written the weights since the last `take`."""

    def arm(self, parameters: Sequence[nn.Parameter]) -> None:
        """Look at some of `parameters`, of those that have a gradient by now; twice does nothing."""
        if self._checked:
            return
        # before the first backward pass none has a gradient
        able = [parameter for parameter in parameters if parameter.grad is not None and _able(parameter)]
        able = [parameter for parameter in able if parameter.numel() <= LARGEST] or able
        for parameter in smallest_of_parts(able, STALE_CHECKS):
            assert parameter.grad is not None, "it is able"
            self._checked.append(
                _CheckedParameter(weakref.ref(parameter), weakref.ref(parameter.grad), _version(parameter))
            )
        if self.hooked:
            self._hook()

    def disarm(self) -> None:
        """Take the hooks off; idempotent."""
        self.hooks.remove()
        self._checked = []

    def after_step(self, *, fused: Callable[[], bool] = lambda: False) -> None:
        """The optimizer has stepped, and the gradients were clipped, if they ever are: what is written from now on is
        written to clear them. `fused`: whether torch does not count what the optimizer has written to the weights.

        Without hooks, only called where the gradients may be other tensors than at `take`.
        """
        if self.hooked:
            self._written |= fused()
        for checked in self._checked:
            gradient = checked.remember()
            if self.hooked:
                checked.gradient_version = None if gradient is None else _version(gradient)

    def take(self, *, sampled: bool) -> Tensor | float | None:
        """How large the gradients are that were there, in units of those that were added to them: shape [1]; 0.0 where
        most had been cleared; None where nothing can be said. The optimizer is about to step.

        `sampled`: whether this step's update will be measured. Where it was not for the step before, the optimizer must
        have been seen to write the weights: a wrapper that really steps at every fourth call clears only then, too.
        """
        if not self.hooked:
            self._updates_known, self._written = sampled, False
            answer: Tensor | float | None = None
            for checked in self._checked:
                parameter, last = checked.parameter(), checked.last
                gradient = None if parameter is None else parameter.grad
                if gradient is None:
                    checked.last = None
                    continue
                checked.last = weakref.ref(gradient)
                # a backward pass adds in place to a strided gradient without a graph
                fresh = last is not None and last() is not gradient and not gradient.requires_grad
                if not (fresh and gradient.layout is torch.strided):
                    self._look_closely()
                    return None
                answer = 0.0
            return answer
        return self._take_seen(sampled)

    def _take_seen(self, sampled: bool) -> Tensor | float | None:
        """The same of what hooks have seen."""
        seen = [checked for checked in self._checked if checked.cleared or checked.added]
        moved = self._updates_known or self._written
        moved |= any(checked.weight_version != _version(checked.parameter()) for checked in seen)
        self._updates_known, self._written = sampled, False
        uncleared = [
            (one.old, one.new) for one in seen if not one.cleared and one.old is not None and one.new is not None
        ]
        answer: Tensor | float | None = None
        if seen and 2 * len(uncleared) <= len(seen):
            answer = 0.0
        elif seen and moved:
            old, new = (wide_norm(joined(norms)) for norms in zip(*uncleared, strict=True))
            answer = (old / new).reshape(1)
        self._clean = self._clean + 1 if seen and all(checked.gone for checked in seen) else 0
        for checked in self._checked:
            checked.begin()
        if self._clean >= TRUSTED:
            self.hooks.remove()
            self.hooked = False
            for checked in self._checked:
                checked.remember()
        return answer

    def _hook(self) -> None:
        """From now on hooks look on."""
        self.hooked = True
        try:
            for checked in self._checked:
                if (parameter := checked.parameter()) is not None:
                    self.hooks.on_gradient(parameter, _on_arrival(checked, self._errors))
                    self.hooks.on_gradient(parameter, _on_accumulated(checked, self._errors), accumulated=True)
        except BaseException:
            self.disarm()
            raise

    def _look_closely(self) -> None:
        """A gradient is the tensor that was there after the last step: from now on hooks look on."""
        self._clean = 0
        self._hook()
        for checked in self._checked:
            checked.begin()


def _on_arrival(checked: _CheckedParameter, errors: list[Exception]) -> Callable[[Tensor | None], None]:
    def on_gradient(gradient: Tensor | None) -> None:
        if is_tracing() or gradient is None:
            return
        try:
            if checked.cleared or is_vmapped(gradient):
                return
            there = checked.gradient
            if there is None or (checked.gradient_version is not None and checked.gradient_version != _version(there)):
                checked.cleared, checked.gone = True, there is None
                return
            # not every write is counted: `grad.data.zero_()` is not
            old, new = (wide_norm(dense_real(tensor.detach())) for tensor in (there, gradient))
            checked.old = old if checked.old is None else torch.minimum(checked.old, old)
            checked.new = new if checked.new is None else torch.maximum(checked.new, new)
        except Exception as error:  # raised here, it would end the user's backward pass
            errors.append(error)

    return on_gradient


def _on_accumulated(checked: _CheckedParameter, errors: list[Exception]) -> Callable[[Tensor], None]:
    def accumulated(parameter: Tensor) -> None:
        if is_tracing():
            return
        try:
            # torch.autograd.grad calls the hook before, too, and adds nothing
            checked.added = True
            if checked.gradient_version is not None:
                checked.gradient_version = _version(parameter.grad)
        except Exception as error:
            errors.append(error)

    return accumulated


def _able(parameter: nn.Parameter) -> bool:
    """Whether hooks can look at its gradient: those on the parts of a sharded one are never called."""
    if is_lazy(parameter) or not parameter.requires_grad:
        return False
    return parameter.is_floating_point() and not is_dtensor(parameter) and not parameter.is_inference()


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else version_of(tensor)
