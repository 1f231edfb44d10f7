"""Keeps an optimizer from a step: by `found_inf`, or by removing its gradients until the step is over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD

from gradwatch.measure.loss_scale import unscales_inside


class SkippedStep:
    """Steps for which an optimizer is called and which it does not take."""

    def __init__(self, ref: Callable[[], Any]) -> None:
        """`ref`: gives the optimizer, which is not kept alive."""
        self._ref = ref
        self._hook: Any = None
        """The handle of the hook on its steps."""
        self._undo: Callable[[], None] | None = None
        """To be called after its step."""
        self._found: Tensor | None = None
        """The `found_inf` set here; a loss scaler sets and removes its own under the same name."""

    def begin(self) -> None:
        """A step begins. The last one may not have been taken: a loss scaler or the loop left it out."""
        self._undo = None
        self._clear_found_inf()

    def detach(self) -> None:
        """Remove everything from the optimizer."""
        if self._hook is not None:
            self._hook.remove()
        self.begin()

    def set_found_inf(self, refused: Tensor) -> None:
        """Make a fused optimizer change nothing if `refused`, which only the device knows."""
        before, found = self._found, refused.to(torch.float32)
        self._ref().found_inf = self._found = found if before is None else torch.maximum(before, found)
        self._hook_step()

    def remove_gradients(self) -> None:
        """Remove the gradients of the optimizer, which changes no parameter without one.

        The smallest parameter gets a gradient of zeros, and is restored after the step: torch's clip_grad_value_ raises
        if there is no gradient at all, and so may a user's code.
        """
        optimizer = self._ref()
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        smallest = min(held, key=lambda parameter: int(parameter.numel()), default=None)
        zeros = None if smallest is None else torch.zeros_like(smallest.grad)
        for parameter in held:
            parameter.grad = None
        if smallest is not None and not isinstance(optimizer, LBFGS) and self._hook_step():
            smallest.grad = zeros
            self._undo = restorer(optimizer, smallest)

    def _hook_step(self) -> bool:
        """Have `_stepped` called after the steps; returns whether the optimizer supports such hooks."""
        if self._hook is None:
            register, this = getattr(self._ref(), "register_step_post_hook", None), weakref.ref(self)
            if register is None:
                return False

            def stepped(*_: object) -> None:
                if (owner := this()) is not None:
                    owner._stepped()

            self._hook = register(stepped)
        return True

    def _stepped(self) -> None:
        self._clear_found_inf()
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _clear_found_inf(self) -> None:
        optimizer, found, self._found = self._ref(), self._found, None
        if found is not None and optimizer is not None and vars(optimizer).get("found_inf") is found:
            del optimizer.found_inf


def skips_by_found_inf(optimizer: Any) -> bool:
    """Whether `optimizer` can leave out its next step by `found_inf`, bit for bit.

    SGD with `fused=True` allocates its momentum before a first step and writes it only if the step is taken: the next
    step would use memory that was never written.
    """
    if not unscales_inside(optimizer):
        return False
    if not isinstance(optimizer, SGD):
        return True
    with_momentum = (group["params"] for group in optimizer.param_groups if group["momentum"])
    return all(
        parameter.grad is None or optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
        for parameters in with_momentum
        for parameter in parameters
    )


def restorer(optimizer: Any, parameter: Tensor) -> Callable[[], None]:
    """A function that restores `parameter` and its optimizer state to what they are now."""
    known = parameter in optimizer.state
    value = parameter.detach().clone()
    state = (
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizer.state[parameter].items()} if known else {}
    )

    @torch.no_grad()
    def undo() -> None:
        parameter.grad = None
        parameter.copy_(value)
        if not known:
            optimizer.state.pop(parameter, None)
            return
        now = optimizer.state[parameter]
        for key in now.keys() - state.keys():
            del now[key]
        for key, was in state.items():
            if isinstance(was, Tensor) and isinstance(now.get(key), Tensor) and now[key].shape == was.shape:
                now[key].copy_(was)
            else:
                now[key] = was

    return undo
