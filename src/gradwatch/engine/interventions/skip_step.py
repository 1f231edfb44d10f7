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
    """Steps for which optimizers are called and which they do not take."""

    def __init__(self) -> None:
        self._post_hooks: list[tuple[Any, Any]] = []
        """The optimizers and the handles of the hooks on their steps."""
        self._undo: dict[int, Callable[[], None]] = {}
        """Optimizer -> the function to call after its step."""
        self._found: dict[int, Tensor] = {}
        """Optimizer -> the `found_inf` set here; a loss scaler sets and removes its own under the same name."""

    def begin(self, optimizer: Any) -> None:
        """A step of `optimizer` begins. The last one may not have been taken: a loss scaler or the loop left it out."""
        self._undo.pop(id(optimizer), None)
        self._clear_found_inf(optimizer)

    def detach(self) -> None:
        """Remove everything from the optimizers."""
        for optimizer, hook in self._post_hooks:
            hook.remove()
            self._clear_found_inf(optimizer)
        self._post_hooks.clear()
        self._undo.clear()

    def set_found_inf(self, optimizer: Any, refused: Tensor) -> None:
        """Make a fused `optimizer` change nothing if `refused`, which only the device knows."""
        before, found = self._found.get(id(optimizer)), refused.to(torch.float32)
        optimizer.found_inf = self._found[id(optimizer)] = found if before is None else torch.maximum(before, found)
        self._hook_step(optimizer)

    def remove_gradients(self, optimizer: Any) -> None:
        """Remove the gradients of `optimizer`, which changes no parameter without one.

        The smallest parameter gets a gradient of zeros, and is restored after the step: torch's clip_grad_value_ raises
        if there is no gradient at all, and so may a user's code.
        """
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        smallest = min(held, key=lambda parameter: int(parameter.numel()), default=None)
        zeros = None if smallest is None else torch.zeros_like(smallest.grad)
        for parameter in held:
            parameter.grad = None
        if smallest is not None and not isinstance(optimizer, LBFGS) and self._hook_step(optimizer):
            smallest.grad = zeros
            self._undo[id(optimizer)] = restorer(optimizer, smallest)

    def _hook_step(self, optimizer: Any) -> bool:
        """Have `_stepped` called after the steps of `optimizer`; returns whether it supports such hooks."""
        if not any(one is optimizer for one, _ in self._post_hooks):
            register, this = getattr(optimizer, "register_step_post_hook", None), weakref.ref(self)
            if register is None:
                return False

            def stepped(one: Any, *_: object) -> None:
                if (owner := this()) is not None:
                    owner._stepped(one)

            self._post_hooks.append((optimizer, register(stepped)))
        return True

    def _stepped(self, optimizer: Any) -> None:
        self._clear_found_inf(optimizer)
        if (undo := self._undo.pop(id(optimizer), None)) is not None:
            undo()

    def _clear_found_inf(self, optimizer: Any) -> None:
        found = self._found.pop(id(optimizer), None)
        if found is not None and vars(optimizer).get("found_inf") is found:
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
