"""The loss scale of fp16 training, from a `torch.amp.GradScaler`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from gradwatch.core.arguments import attribute, wrong
from gradwatch.measure.optimizer_steps import weak_reference

SEVERAL_SCALERS = (
    "several GradScalers are in use, and every grad_norm may hold the loss scale of one: Watch(model, scaler=scaler) "
    "tells which it is"
)
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


def has_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether `scaler.unscale_(optimizer)` was called since its last step; private, a test fails if it moves."""
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return getattr(state.get("stage"), "name", "READY") != "READY"


class ScalerSearch:
    """Finds the GradScaler of a loop that has not given it: the one that changes with each step, its scale or the
    number of steps that it counts.
    """

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        """The one in use: until one has changed, the only one that has unscaled these gradients, or else the only one
        that has scaled a loss and not changed since.
        """
        self._seen: list[tuple[GradScaler, tuple[float, int]]] | None = []
        """Those that there are, and what they were before the first step; None once it is known which is in use."""
        self._optimizer: Callable[[], Any] = lambda: None

    def look(self, optimizer: Any, *, half: bool) -> str:
        """Look before a step of `optimizer`. `half`: whether it has backward signals in float16: there the search
        begins. Returns what to tell the user, empty where all steps are measured without the scale.
        """
        if self._seen is None or not (half or self._seen):
            return ""
        if not self._seen:
            scalers = [one for one in gc.get_objects() if issubclass(type(one), GradScaler)]
            self._seen = [(one, state) for one in scalers if (state := _state_of(one))] or None
            self._optimizer = weak_reference(optimizer)
            seen = [one for one, _ in self._seen or ()]
            likely = [one for one in seen if has_unscaled(one, optimizer)] or list(filter(_is_new, seen))
            self.scaler = likely[0] if len(likely) == 1 else None
            return ""
        if self._optimizer() not in (optimizer, None):
            return ""
        before, used = self.scaler, [one for one, state in self._seen if _state_of(one) not in (state, None)]
        if before is not None and not used:  # it is not updated at each call, or never
            return ""
        self.scaler, self._seen = used[0] if len(used) == 1 else None, None
        if len(used) > 1:
            return SEVERAL_SCALERS
        return "" if self.scaler is before else FIRST_STEP_SCALED


def _state_of(scaler: GradScaler) -> tuple[float, int] | None:
    """Its scale and the steps that it counts; None where it is disabled, or a subclass raises."""
    with suppress(Exception):
        state = scaler.state_dict()
        return float(state["scale"]), int(state["_growth_tracker"])
    return None


def _is_new(scaler: GradScaler) -> bool:
    """Whether it has scaled a loss, and not changed since it was made or loaded; private, tests fail if it moves."""
    with suppress(Exception):
        count = scaler._growth_tracker
        return bool(scaler._scale == scaler._init_scale and count == scaler._init_growth_tracker)
    return False
