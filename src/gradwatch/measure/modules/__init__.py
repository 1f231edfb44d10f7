"""Statistics of modules on sampled steps: of their inputs, their outputs and what flows back to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.modules.input_hooks import InputCallback

LIMIT = 65_536
"""Outputs or backward signals measured in one step at most: a loop that never steps its optimizer does not fill the
memory. Judgement."""

OutputCallback = Callable[[object, Iterable[Tensor]], None]
"""Takes the positional arguments and the output tensors of a call, before anybody can edit them in place."""

GradOutputCallback = Callable[[Tensor], None]
"""Takes dL/d(output) of one output tensor."""


class ModuleReading(Protocol):
    """The numbers of one statistic at one step, on their way to the host."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What has to come to the host, 1-d, by names that no other statistic uses."""

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """Statistic -> one number per site, NaN where not measured. `numbers`: what `tensors` were on the device."""


class ModuleStatistic:
    """Base of the statistics: what a subclass does not override measures nothing.

    A statistic keeps numbers on the device and no tensor of the user's, and never waits for the device.
    """

    def on_input(self, site: int, module: nn.Module) -> InputCallback | None:
        """What to call with the arguments of each call of `module`; None to measure nothing there."""
        return None

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        """What to call with the outputs of `module`; `kind`: which activation it is, "" for a layer. None to measure
        nothing there.
        """
        return None

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        """What to call with the gradients of the outputs of `module`; None to measure nothing there."""
        return None

    def on_loss(self, loss: Tensor) -> None:
        """A backward pass begins at `loss`, whose graph still exists; called where the training loop says so."""
        return

    def collect(self, layout: Layout) -> ModuleReading | None:
        """What has been measured since the last call; None if nothing has."""
        return None
