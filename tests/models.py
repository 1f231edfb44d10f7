"""The models that the tests share, and their inputs: small, and seeded."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

WIDE = 160
"""A square weight of this width is measured inside its hook, a smaller parameter at the step."""


def wide_net() -> nn.Sequential:
    """One weight that is measured in its hook, small parameters that are measured at the step."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 2))


def wide_net_of_three() -> nn.Sequential:
    """As `wide_net`, with a third layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 2))


def mlp(
    outputs: int = 1,
    *,
    inputs: int = 8,
    depth: int = 3,
    width: int = 16,
    act: Callable[[], nn.Module] = nn.ReLU,
    bias: bool = True,
    seed: int | None = 0,
) -> nn.Sequential:
    """`depth` hidden layers of `width`, each with its activation, and a linear output layer; `seed`: None for none."""
    if seed is not None:
        torch.manual_seed(seed)
    widths = [inputs] + [width] * depth
    stages = [stage for a, b in pairwise(widths) for stage in (nn.Linear(a, b, bias=bias), act())]
    return nn.Sequential(*stages, nn.Linear(width, outputs, bias=bias))


def wide_inputs(step: int) -> Tensor:
    return torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step))


def module_of(
    net: nn.Module,
    loss: Callable[[nn.Module, Any, int], Tensor],
    *,
    lr: float,
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    logged: str = "",
    validates: bool = False,
    package: str = "lightning.pytorch",
) -> Any:
    """A LightningModule of `package` that trains `net`, its layer "net", on `loss(net, batch, batch_idx)`.

    `logged`: the name under which it logs the loss.
    """

    class Module(import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            found = loss(self.net, batch, batch_idx)
            if logged:
                self.log(logged, found)
            return found

        if validates:

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                loss(self.net, batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return kind(self.parameters(), lr=lr)  # type: ignore[call-arg]

    return Module()


# ---- outputs of any structure


@dataclass
class Outputs:
    loss: Tensor | None
    states: dict[str, Any]


Two = namedtuple("Two", "left right")


class TwoOutputs(nn.Module):
    """Returns its two output tensors in the structure that `wrap` makes of them."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.wrap = wrap

    def forward(self, x: Tensor, *, text: str = "") -> Any:
        return self.wrap(x * self.weight, x + self.weight)


STRUCTURES: dict[str, Any] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "nested": lambda a, b: [(a, None), {"deep": [b]}],
    "dict": lambda a, b: {"a": a, "b": b, "c": "text", "d": 3},
    "ordered": lambda a, b: OrderedDict(a=a, b=b),
    "dataclass": lambda a, b: Outputs(a, {"b": b}),
    "namedtuple": Two,
    "same twice": lambda a, b: (a, b, a),
}
