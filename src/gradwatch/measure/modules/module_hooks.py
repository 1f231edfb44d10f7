"""Hooks on layers and activations, attached on sampled steps, which pass inputs, outputs and signals to statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.hooks.garbage_collector import no_collections
from gradwatch.hooks.hook_set import HookCosts, HookSet
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.measure.devices import moved
from gradwatch.measure.layers import Layer
from gradwatch.measure.modules import GradOutputCallback, ModuleReading, ModuleStatistic, OutputCallback
from gradwatch.measure.modules.input_hooks import Arguments, InputCallback, register_input_hook


@dataclass(slots=True, eq=False)
class _StepOrder:
    """The order in which the modules ran in one sampled step."""

    sites: dict[int, None] = field(default_factory=dict)
    """Sites of layers and activations in the order in which they first ran."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleHooksReading:
    """What the statistics have measured in one step, being copied to the host."""

    layout: Layout
    host_copy: HostCopy
    readings: Sequence[ModuleReading]
    order: tuple[int, ...] = ()
    """Sites of layers and activations in the order in which they first ran in the step."""

    def values(self) -> dict[str, Floats]:
        """Statistic -> one number per site: those of all statistics, and `run_order`."""
        numbers = self.host_copy.wait()
        found: dict[str, Floats] = {"run_order": np.full(len(self.layout), np.nan)}
        found["run_order"][list(self.order)] = np.arange(len(self.order))
        for reading in self.readings:
            found |= reading.values(numbers)
        return found


class ModuleHooks:
    """Owns the hooks on modules, which are attached on sampled steps only."""

    def __init__(self, statistics: Sequence[ModuleStatistic], costs: HookCosts) -> None:
        """`costs`: those of these hooks and of the statistics' own."""
        self.hooks = HookSet()
        self.statistics = statistics
        self._step = _StepOrder()
        self._layers: dict[int, None] = {}
        """Sites of layers in the order in which they first ran, in the last step or an earlier one."""
        self._costs = costs

    @no_collections()
    def attach(self, layers: Sequence[Layer], layout: Layout, *, full: bool = False) -> None:
        """Hook `layers` and their activations until `remove`; measurements are kept until `collect`. A second call does
        nothing.

        `full`: backward signals by torch's own full backward hooks.
        """
        if len(self.hooks):
            return
        try:
            for layer in layers:
                if layer.hookable:
                    site = layout.index[layer.name]
                    self._hook_outputs(layer.module, site, "", full=full)
                    self._hook_inputs(layer.module, site)
                for activation in layer.activations:
                    site_of_activation = layout.index.get(activation.name)
                    if site_of_activation is not None:
                        self._hook_outputs(activation.module, site_of_activation, activation.kind, full=full)
        except BaseException:
            self.remove()
            raise

    def _hook_outputs(self, module: nn.Module, site: int, kind: str, *, full: bool) -> None:
        each = self.statistics
        outputs = [hook for one in each if (hook := one.on_output(site, module, kind)) is not None]
        gradients = [call for one in each if (call := one.on_grad_output(site, module, kind)) is not None]
        if outputs or gradients or not kind:
            self.hooks.on_outputs(
                module,
                _call_with_gradient(self._costs, gradients) if gradients else None,
                partial(self._step.sites.setdefault, site),
                on_output=_call_with_outputs(outputs) if outputs else None,
                full=full,
                costs=self._costs,
            )

    def _hook_inputs(self, module: nn.Module, site: int) -> None:
        for statistic in self.statistics:
            if (on_input := statistic.on_input(site, module)) is not None:
                self.hooks.add(register_input_hook(module, _timed(self._costs, on_input), self._costs.errors))

    def remove(self) -> None:
        """Remove the hooks."""
        self.hooks.remove()

    def on_loss(self, loss: Tensor) -> None:
        """A backward pass begins at `loss`."""
        for statistic in self.statistics if len(self.hooks) else ():
            statistic.on_loss(loss)

    def order(self) -> tuple[int, ...]:
        """Site indices of the layers in the order in which they first ran, up to the last `collect`."""
        return tuple(self._layers)

    def collect(self, layout: Layout) -> ModuleHooksReading | None:
        """What has been measured since `attach`; None if nothing has."""
        step, self._step = self._step, _StepOrder()
        self._layers |= dict.fromkeys(site for site in step.sites if layout.sites[site].kind == "layer")
        readings = [reading for each in self.statistics if (reading := each.collect(layout)) is not None]
        tensors = {name: tensor for reading in readings for name, tensor in reading.tensors.items()}
        if not tensors:
            return None
        device = next(iter(tensors.values())).device
        host_copy = HostCopy({name: moved(tensor, device) for name, tensor in tensors.items()})
        return ModuleHooksReading(layout, host_copy, readings, tuple(step.sites))


def _call_with_outputs(callbacks: Sequence[OutputCallback]) -> OutputCallback:
    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        for callback in callbacks:
            callback(arguments, tensors)

    return on_output if len(callbacks) > 1 else callbacks[0]


def _timed(costs: HookCosts, on_input: InputCallback) -> InputCallback:
    def timed(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Arguments | None:
        begun = perf_counter()
        new_arguments = on_input(arguments, keywords)
        costs.current += perf_counter() - begun
        return new_arguments

    return timed


def _call_with_gradient(costs: HookCosts, callbacks: Sequence[GradOutputCallback]) -> Callable[[Tensor | None], None]:
    def on_grad_output(gradient: Tensor | None) -> None:
        if gradient is None:
            return
        begun = perf_counter()
        try:
            for callback in callbacks:
                callback(gradient)
        except Exception as error:  # raised here, it would end the user's backward pass
            costs.errors.append(error)
        costs.current += perf_counter() - begun

    return on_grad_output
