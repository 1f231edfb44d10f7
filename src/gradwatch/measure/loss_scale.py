"""The loss scale of fp16 training: what a `torch.amp.GradScaler` says of it, and what gradients tell of one."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwatch.core.record import Floats

LEAST = 2.0**7
"""The smallest factor that is taken for a loss scale. Judgement: gradients are divided by smaller powers of two for
other reasons; a GradScaler begins with 2^16."""
ROUNDING = 1e-5
"""How far norms may be from it, relatively: they are float32."""


def check_scaler(scaler: Any) -> None:
    """Raises TypeError where `scaler` is neither None nor a GradScaler by what it can do."""
    lacking = [name for name in ("scale", "is_enabled", "unscale_") if not callable(getattr(scaler, name, None))]
    if scaler is not None and (lacking or isinstance(scaler, type)):
        raise TypeError(f"scaler={scaler!r}: expected a torch.amp.GradScaler, or None without one")


def scale_on(scaler: Any, device: torch.device) -> Tensor:
    """The loss scale, 0-d, on `device`; does not wait for it."""
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def scale_for(scaler: Any, optimizer: Any) -> Tensor:
    """The loss scale where the parameters of `optimizer` are."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return scale_on(scaler, next((parameter.device for parameter in parameters), torch.device("cpu")))


def unscales_inside(optimizer: Any) -> bool:
    """Whether `optimizer` takes the loss scale out of its gradients inside its step, as those with `fused=True` do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def is_scaled(optimizer: Any) -> bool:
    """Whether such an optimizer, about to move, has been told of a scale that is still in its gradients."""
    return getattr(optimizer, "grad_scale", None) is not None


def has_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether `scaler.unscale_(optimizer)` was called since its last step; private there, and guarded by a test."""
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return getattr(state.get("stage"), "name", "READY") != "READY"


def left_in(before: Floats, after: Floats) -> float:
    """The loss scale that norms have `before` and not `after`: one power of two for all; 0 where there is none."""
    if before[0] < LEAST / 2 * after[0]:  # the totals: with a clipping this is asked at every step
        return 0.0
    known = np.isfinite(before) & np.isfinite(after) & (before > 0) & (after > 0)
    if not known.any():
        return 0.0
    factors = before[known] / after[known]
    scale = float(2.0 ** np.round(np.log2(factors[0])))
    return scale if scale >= LEAST and np.allclose(factors, scale, rtol=ROUNDING, atol=0.0) else 0.0
