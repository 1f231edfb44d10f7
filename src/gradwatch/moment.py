"""What the training loop says of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a step stands, and numbers of the whole step."""

    step: int
    axis: int
    scalars: Mapping[str, float]
    loss: Tensor | None = None
    """The loss of this rank, 0-d."""
    scale: Tensor | None = None
    """The loss scale, 0-d."""
    unscaled: bool = True
    """Whether the loss scale is out of the gradients by now."""


def learning_rate(optimizer: Any) -> dict[str, float]:
    """The first group's learning rate; none where it is a tensor, which is not read."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return {"lr": float(rate)} if isinstance(rate, int | float) else {}
