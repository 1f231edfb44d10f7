"""The loss scale of fp16 training, from a `torch.amp.GradScaler`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from gradwatch.core.arguments import attribute, wrong
from gradwatch.measure.optimizer_steps import weak_reference

FIRST_STEP_SCALED = (
    "the norms of the first step are too large or too small by a loss scale: which GradScaler this loop uses has shown "
    "after it. Watch(model, scaler=scaler) tells it before"
)


def check_scaler(scaler: Any) -> None:
    """Raises TypeError unless `scaler` is None or has the methods of a GradScaler."""
    missing = [name for name in ("scale", "is_enabled", "unscale_") if not callable(attribute(scaler, name))]
    if scaler is not None and (missing or isinstance(scaler, type)):
        raise TypeError(wrong("scaler", scaler, "a torch.amp.GradScaler, or None without one"))


def scale_on(scaler: Any, device: torch.device) -> Tensor:
    """The loss scale, 0-d, on `device`; waits for a scale that has to come to the CPU, and for no other."""
    if device.type == "cpu":  # where the scaler would use a scale that has not arrived yet
        return torch.tensor(float(scaler.get_scale()), device="cpu")
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def scale_for(scaler: Any, optimizer: Any) -> Tensor:
    """The loss scale, 0-d, on a device of the parameters of `optimizer`, the CPU only where there is no other."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    devices = (parameter.device for parameter in parameters)
    return scale_on(scaler, next((device for device in devices if device.type != "cpu"), torch.device("cpu")))


def unscales_inside(optimizer: Any) -> bool:
    """Whether `optimizer` unscales its gradients inside its step, as those with `fused=True` do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_scaled(optimizer: Any) -> bool:
    """Whether such an optimizer, about to step, has been given a loss scale that its gradients still have."""
    return getattr(optimizer, "grad_scale", None) is not None


def has_unscaled(scaler: Any, *optimizers: Any) -> bool:
    """Whether `scaler.unscale_` was called since the last step for one of `optimizers`, which are an optimizer and what
    wraps it; private, a test fails if it moves.
    """
    states = _states(scaler) or {}
    stages = (states[id(one)].get("stage") for one in optimizers if id(one) in states)
    return any(getattr(stage, "name", "READY") != "READY" for stage in stages)


@dataclass(slots=True)
class _Use:
    """What is known of the scaler of one optimizer."""

    optimizer: Callable[[], Any]
    """Gives it while it is there."""
    scaler: GradScaler | None
    """The one that it uses, or most likely uses."""
    seen: list[tuple[GradScaler, Mapping[int, Any]]] | None
    """All scalers, and what each held of its optimizers at the first step; None once it is known which is in use."""


class ScalerSearch:
    """Finds the GradScaler that each optimizer of a loop uses, where the loop has not given it: a scaler holds a state
    of each optimizer from `unscale_` or `step` to `update`.
    """

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        """That of the optimizer that was looked at last. At its first step: the one that has unscaled its gradients, or
        else the only one that has scaled a loss and not changed since, or else that of the optimizer before.
        """
        self._scalers: list[GradScaler] | None = None
        """Those that there are, once there was a reason to look."""
        self._uses: dict[int, _Use] = {}
        """By the optimizer's identity."""

    def look(self, optimizer: Any, wrapper: Any, *, half: bool) -> str:
        """Look before a step of `optimizer`. `wrapper`: what the loop steps, it or what wraps it. `half`: whether it
        has backward signals in float16: there the search begins. Returns what to tell the user, empty where all steps
        are measured without the scale.
        """
        if self._scalers is None and half:
            found = (one for one in gc.get_objects() if issubclass(type(one), GradScaler))
            self._scalers = [one for one in found if attribute(one, "_enabled") and _states(one) is not None]
        if not self._scalers:
            return ""
        held, use = {id(optimizer), id(wrapper)}, self._uses.get(id(optimizer))
        if use is None or use.optimizer() is not optimizer:
            self._uses = {identity: one for identity, one in self._uses.items() if one.optimizer() is not None}
            likely = [one for one in self._scalers if not held.isdisjoint(_states(one))]
            likely = likely or list(filter(_is_new, self._scalers))
            scaler = likely[0] if len(likely) == 1 else self.scaler
            seen = [(one, _states(one)) for one in self._scalers]
            use = self._uses[id(optimizer)] = _Use(weak_reference(optimizer), scaler, seen)
        elif use.seen:
            before, used = use.scaler, [one for one, states in use.seen if not held.isdisjoint(states)]
            if used or any(_states(one) is not states for one, states in use.seen):  # else none was updated since
                use.scaler, use.seen = used[0] if used else None, None
            if use.scaler is not before:
                self.scaler = use.scaler
                return FIRST_STEP_SCALED
        self.scaler = use.scaler
        return ""


def _states(scaler: GradScaler) -> Any:
    """What `scaler` holds of optimizers by their identity, another dict after each `update`; private, tests fail if it
    moves.
    """
    return attribute(scaler, "_per_optimizer_states")


def _is_new(scaler: GradScaler) -> bool:
    """Whether it has scaled a loss, and not changed since it was made or loaded; private, tests fail if it moves."""
    with suppress(Exception):
        count = scaler._growth_tracker
        return bool(scaler._scale == scaler._init_scale and count == scaler._init_growth_tracker)
    return False
