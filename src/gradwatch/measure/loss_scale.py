"""The loss scale of fp16 training, from a `torch.amp.GradScaler`."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradwatch.core.arguments import attribute, wrong


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
