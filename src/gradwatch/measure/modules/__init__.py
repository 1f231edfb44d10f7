"""The contract of what measures the outputs of modules, and what flows back to them, on sampled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout

LIMIT = 65_536
"""Outputs or signals measured in one step at most: a loop that never steps its optimizer does not fill the memory.
Judgement."""

Gave = Callable[[object, Iterable[Tensor]], None]
"""Takes the positional arguments and the output tensors of a call, before anybody can edit them in place."""

Arrived = Callable[[Tensor], None]
"""Takes dL/d(output) of one output tensor."""


class ModuleReading(Protocol):
    """The numbers of one gauge at one step, under way."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What has to come to the host, 1-d, by names that no other gauge uses."""

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """Statistic -> one number per site, NaN where not measured. `numbers`: what `tensors` were on the device."""


class ModuleStatistic(Protocol):
    """Sees one module at a time, keeps numbers of it on the device, and no tensor of the user's; never waits."""

    def on_output(self, site: int, module: nn.Module, kind: str) -> Gave | None:
        """What to call with the outputs of `module`; `kind`: which activation it is, "" for a layer.

        None where it measures nothing there.
        """

    def on_signal(self, site: int, module: nn.Module, kind: str) -> Arrived | None:
        """What to call with the gradients of the outputs of `module`; None where it measures nothing there."""

    def on_loss(self, loss: Tensor) -> None:
        """A backward pass begins at `loss`, whose graph is there; called where the Trainer tells."""

    def collect(self, layout: Layout) -> ModuleReading | None:
        """What has been measured since this was last asked; None if nothing has."""
