"""Statistics of modules on sampled steps: of their inputs, their outputs and their backward signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout

MAX_TENSORS = 65_536
"""Outputs or backward signals measured in one step at most, which bounds the memory of a loop that never steps its
optimizer. Judgement."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""

InputCallback = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Arguments | None]
"""Takes a module that is about to run, and its arguments; returns those to run it with, None for the same."""

OutputCallback = Callable[[object, Iterable[Tensor]], None]
"""Takes the positional arguments and the output tensors of a call, before any in-place edit of them."""

GradOutputCallback = Callable[[Tensor], None]
"""Takes dL/d(output) of one output tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleReading:
    """The numbers of one statistic at one step, on the device."""

    tensors: Mapping[str, Tensor]
    """What is to be copied to the host, 1-d, by names that no other statistic uses."""
    values: Callable[[Mapping[str, Floats]], dict[str, Floats]]
    """Takes `tensors`, copied to the host: statistic -> one number per site, NaN where not measured."""


class ModuleStatistic:
    """Base class of the statistics: a method that is not overridden measures nothing.

    A statistic keeps numbers on the device and no tensor of the user's, and never waits for the device. Its callbacks
    are used again at later samples, and hold no module and no parameter.
    """

    version: int = 0
    """Changes when modules want other callbacks than they were given, or none; so does what trains."""

    def on_input(self, site: int, module: nn.Module) -> InputCallback | None:
        """The callback for each call of `module`; None to measure no input."""
        return None

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        """The callback for the outputs of `module`; None to measure none. `kind`: of the activation, "" for a layer."""
        return None

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        """The callback for the gradients of the outputs of `module`; None to measure none."""
        return None

    def on_repeated_calls(self, sites: Sequence[int]) -> None:
        """These layers and activations have run more than once since the last `collect`, which follows."""
        return

    def on_loss(self, loss: Tensor) -> None:
        """A backward pass begins at `loss`, whose graph still exists; not every training loop reports it."""
        return

    def collect(self, layout: Layout) -> ModuleReading | None:
        """What has been measured since the last `collect`; None if nothing has."""
        return None
