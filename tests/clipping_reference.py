"""The reference of clipping: gradients before and after, and what they ought to have become, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from reference import held_by, names

Gradients = dict[str, Tensor]
"""Parameter name -> gradient, dense, without the loss scale, float64 or complex128."""


class Taken(pl.Callback):
    """Takes down the gradients at each step, where it stands in the list of callbacks."""

    def __init__(self) -> None:
        self.steps: list[Gradients] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
        self.steps.append(taken(pl_module, optimizer, scaler.get_scale() if scaled else 1.0))


def taken(model: nn.Module, optimizer: Any, scale: float = 1.0) -> Gradients:
    mine = held_by(optimizer)
    found = {}
    for name, (_, parameter) in names(model).items():
        if id(parameter) in mine and parameter.grad is not None:
            gradient = parameter.grad.detach().clone()
            dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
            found[name] = dense.to(torch.complex128 if dense.is_complex() else torch.float64) / scale
    return found


def layer_of(name: str, model: nn.Module) -> str:
    return names(model)[name][0]


def joint_factors(gradients: Mapping[str, Tensor], model: nn.Module, limit: float) -> dict[str, float]:
    """Layer -> min(1, C / (sqrt(sum |g|^2) + 1e-6)); 1 where that norm is not finite."""
    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        layer = layer_of(name, model)
        squares[layer] = squares.get(layer, 0.0) + float(gradient.abs().square().sum())
    whole = {layer: torch.tensor(square).sqrt().double() for layer, square in squares.items()}
    return {
        layer: min(1.0, limit / (float(norm) + 1e-6)) if bool(norm.isfinite()) else 1.0 for layer, norm in whole.items()
    }


def far(shown: Tensor, right: Tensor) -> float:
    """The largest difference, in units of the largest magnitude; 0 where neither is finite."""
    if not shown.numel() or (not bool(right.isfinite().all()) and not bool(shown.isfinite().all())):
        return 0.0
    return float((shown - right).abs().max() / right.abs().max().clamp(min=1e-300))
