"""What the training loop says of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Adam, Adamax, RMSprop

DIVIDING = (Adam, Adamax, RMSprop)
"""Optimizers that add `weight_decay` to the gradient and divide by its size."""


@dataclass(slots=True)
class StepInfo:
    """Where a step stands, and numbers of the whole step."""

    step: int
    axis: int
    scalars: Mapping[str, float]
    scale: Tensor | None = None
    """The loss scale of the backward pass, 0-d."""
    scale_in_gradients: Tensor | None = None
    """`scale`, if it is still in the gradients."""

    def window(self, passes: int) -> float:
        """The share n/N of an accumulation's micro-batches that `passes`, where known, have brought."""
        whole = self.scalars.get("accumulate", 1.0)
        return min(1.0, passes / whole) if passes and whole > 1 else 1.0


def optimizer_numbers(optimizer: Any) -> dict[str, float]:
    """`lr`, `momentum`, `weight_decay` and `eps`, the first group's; `decay_in_gradient`, 1 where that is added to the
    gradient and divided by its size, as by Adam and not by AdamW; `maximize`, 1 where all groups go up the loss;
    `lr_highest`, where the groups differ; and `lr_waits`, 1 where groups have a rate of 0 by a plan: a scheduler holds
    one there for now, or two or more have it, as in gradual unfreezing. A rate mistaken is one group's.

    Rates that are tensors are not read.
    """
    numbers: dict[str, float] = {}
    groups = optimizer.param_groups
    still = 0
    for group in groups:
        rate, first = group.get("lr"), group.get("initial_lr")
        if isinstance(rate, int | float) and rate == 0:
            still += 1
            if still > 1 or (isinstance(first, int | float) and first > 0):
                numbers["lr_waits"] = 1.0
    for name in ("lr", "momentum", "weight_decay", "eps") if groups else ():
        number = groups[0].get(name)
        if isinstance(number, int | float) and (name == "lr" or number > 0):
            numbers[name] = float(number)
    # Adam of torch 2.6 does not say so
    if "weight_decay" in numbers and groups[0].get("decoupled_weight_decay", type(optimizer) not in DIVIDING) is False:
        numbers["decay_in_gradient"] = 1.0
    if groups and groups[0].get("maximize") is True and all(group.get("maximize") is True for group in groups[1:]):
        numbers["maximize"] = 1.0
    if len(groups) > 1:
        rates = [rate for group in groups if isinstance(rate := group.get("lr"), int | float)]
        if rates and max(rates) > min(rates):
            numbers["lr_highest"] = float(max(rates))
    return numbers
