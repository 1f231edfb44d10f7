"""One optimizer step as the engine follows it: what the training loop says of it, and what is still to come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class OpenStep:
    """A measured step whose optimizer has not moved yet."""

    optimizer: Any
    index: int
    sampled: bool
    scaled: bool
    seconds: float
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """What the training loop says of a step: where it stands, and numbers of the whole step."""

    step: int
    axis: int
    scalars: Mapping[str, float]


def learning_rate(optimizer: Any) -> dict[str, float]:
    """The first group's learning rate; none where it is a tensor, which is not read."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return {"lr": float(rate)} if isinstance(rate, int | float) else {}


def weakly(method: Any) -> Callable[..., None]:
    """A step hook that does not keep its watch alive."""

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        alive = method()
        if alive is not None:
            alive(optimizer)

    return stepped
