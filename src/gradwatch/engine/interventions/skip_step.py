"""How an optimizer is kept from a step: what it is told or what is taken from it, and what is put back after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS


class SkippedStep:
    """Steps that optimizers are not to take, though they will be called."""

    def __init__(self) -> None:
        self._told: list[tuple[Any, Any]] = []
        """Optimizers whose steps are awaited, with the hooks on them."""
        self._undo: dict[int, Callable[[], None]] = {}
        """Optimizer -> what is to be done after its step."""
        self._found: dict[int, Tensor] = {}
        """Optimizer -> what it was told: a loss scaler tells it by the same name, and takes its own back itself."""

    def begin(self, optimizer: Any) -> None:
        """A step of `optimizer` begins. The one before may never have come: a loss scaler or the loop left it out."""
        self._undo.pop(id(optimizer), None)
        self._untell(optimizer)

    def detach(self) -> None:
        """Leave nothing on the optimizers."""
        for optimizer, hook in self._told:
            hook.remove()
            self._untell(optimizer)
        self._told.clear()
        self._undo.clear()

    def tell(self, optimizer: Any, refused: Tensor) -> None:
        """Have a fused `optimizer` leave everything as it is where `refused`, which the host does not know."""
        before, found = self._found.get(id(optimizer)), refused.to(torch.float32)
        optimizer.found_inf = self._found[id(optimizer)] = found if before is None else torch.maximum(before, found)
        self._await(optimizer)

    def take_away(self, optimizer: Any) -> None:
        """Take the gradients of `optimizer` away: a parameter without one is left alone.

        One small one gets zeros, and is put back as it was after the step: torch's clip_grad_value_ raises where there
        is no gradient at all, and so may code of the user's.
        """
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        witness = min(held, key=lambda parameter: int(parameter.numel()), default=None)
        zeros = None if witness is None else torch.zeros_like(witness.grad)
        for parameter in held:
            parameter.grad = None
        if witness is not None and not isinstance(optimizer, LBFGS) and self._await(optimizer):
            witness.grad = zeros
            self._undo[id(optimizer)] = kept(optimizer, witness)

    def _await(self, optimizer: Any) -> bool:
        """Have `_stepped` called after its steps, if it lets anybody."""
        if not any(one is optimizer for one, _ in self._told):
            register, this = getattr(optimizer, "register_step_post_hook", None), weakref.ref(self)
            if register is None:
                return False

            def stepped(one: Any, *_: object) -> None:
                if (alive := this()) is not None:
                    alive._stepped(one)

            self._told.append((optimizer, register(stepped)))
        return True

    def _stepped(self, optimizer: Any) -> None:
        self._untell(optimizer)
        if (undo := self._undo.pop(id(optimizer), None)) is not None:
            undo()

    def _untell(self, optimizer: Any) -> None:
        found = self._found.pop(id(optimizer), None)
        if found is not None and vars(optimizer).get("found_inf") is found:
            del optimizer.found_inf


def kept(optimizer: Any, parameter: Tensor) -> Callable[[], None]:
    """What puts `parameter`, and what `optimizer` knows of it, back to how they are now."""
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
