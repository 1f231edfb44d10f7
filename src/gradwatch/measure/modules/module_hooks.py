"""Hooks on layers and activations, attached on sampled steps, which pass inputs, outputs and signals to statistics."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.hooks.graph_release import unprepared_calls
from gradwatch.hooks.hook_set import HookCosts, HookSet, OutputHook, UncopiedHook, recorded
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.measure.devices import moved
from gradwatch.measure.layers import Layer
from gradwatch.measure.modules import GradOutputCallback, ModuleReading, ModuleStatistic


@dataclass(slots=True, eq=False)
class _Sample:
    """What the hooks of one sampled step share."""

    sites: list[int] = field(default_factory=list)
    """The site of a layer or activation for each time that it has run."""
    collected: bool = False
    """Whether the step has been read: gradients that arrive later are not its own."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleHooksReading:
    """What the statistics have measured in one step, being copied to the host."""

    layout: Layout
    host_copy: HostCopy
    readings: Sequence[ModuleReading]
    order: tuple[int, ...]
    """Sites of layers and activations in the order in which they first ran in the step."""

    def values(self) -> dict[str, Floats]:
        """Statistic -> one number per site: those of all statistics, and `run_order`."""
        numbers = self.host_copy.wait()
        found: dict[str, Floats] = {"run_order": np.full(len(self.layout.sites), np.nan)}
        found["run_order"][list(self.order)] = np.arange(len(self.order))
        for reading in self.readings:
            found |= reading.values(numbers)
        return found


class ModuleHooks:
    """Owns the hooks on modules, which are made once and put on at sampled steps only."""

    def __init__(self, statistics: Sequence[ModuleStatistic], costs: HookCosts) -> None:
        """`costs`: those of these hooks and of the statistics' own."""
        self.hooks = HookSet()
        self.statistics = statistics
        self._sample = _Sample()
        self.order: dict[int, None] = {}
        """Sites of layers in the order in which they first ran, up to the last `collect`."""
        self._costs = costs
        self._made: list[_HooksOfModule] = []
        self._made_for: object = None
        """What the hooks that are made depend on, besides their modules."""

    def attach(self, layers: Sequence[Layer], layout: Layout, *, full: bool = False) -> None:
        """Hook `layers` and their activations until `hooks` are removed; measurements are kept until `collect`. A
        second call does nothing.

        `full`: backward signals by torch's own full backward hooks.
        """
        if len(self.hooks):
            return
        self._costs.unprepared_calls = unprepared_calls()
        modules = _modules_to_hook(layers, layout)
        trains = [
            parameter.requires_grad
            for module, _, _ in modules
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        wanted = (layout, full, trains, [statistic.version for statistic in self.statistics])
        if wanted != self._made_for or [made.module() for made in self._made] != [module for module, _, _ in modules]:
            self._made_for = wanted
            self._made = [self._make(module, site, kind, full=full) for module, site, kind in modules]
        try:
            for made, (module, _, _) in zip(self._made, modules, strict=True):
                made.attach(module, self._sample, self.hooks)
        except BaseException:
            self.hooks.remove()
            raise

    def on_loss(self, loss: Tensor) -> None:
        """A backward pass begins at `loss`."""
        for statistic in self.statistics if len(self.hooks) else ():
            statistic.on_loss(loss)

    def collect(self, layout: Layout) -> ModuleHooksReading | None:
        """What has been measured since `attach`; None if nothing has."""
        sample, self._sample = self._sample, _Sample()
        sample.collected = True
        calls = Counter(sample.sites)
        self.order |= dict.fromkeys([site for site in calls if layout.sites[site].kind == "layer"])
        if repeated := [site for site, count in calls.items() if count > 1]:
            for statistic in self.statistics:
                statistic.on_repeated_calls(repeated)
        readings = [reading for each in self.statistics if (reading := each.collect(layout)) is not None]
        tensors = {name: tensor for reading in readings for name, tensor in reading.tensors.items()}
        if not tensors:
            return None
        device = next(iter(tensors.values())).device
        host_copy = HostCopy({name: moved(tensor, device) for name, tensor in tensors.items()})
        return ModuleHooksReading(layout, host_copy, readings, tuple(calls))

    def _make(self, module: nn.Module, site: int, kind: str, *, full: bool) -> _HooksOfModule:
        outputs = [hook for one in self.statistics if (hook := one.on_output(site, module, kind)) is not None]
        gradients = [call for one in self.statistics if (call := one.on_grad_output(site, module, kind)) is not None]
        output_hook = OutputHook(self._costs, outputs, full=full) if outputs or not kind else None
        on_grad_output = recorded(partial(_call_all, gradients), self._costs) if gradients else None
        inputs = [one.on_input(site, module) for one in self.statistics]
        input_hooks = [UncopiedHook(recorded(on_input, self._costs)) for on_input in inputs if on_input is not None]
        return _HooksOfModule(weakref.ref(module), site, output_hook, on_grad_output, input_hooks)


@dataclass(frozen=True, slots=True, eq=False)
class _HooksOfModule:
    """The hooks of one layer or activation."""

    module: weakref.ref[nn.Module]
    site: int
    output_hook: OutputHook | None
    on_grad_output: Callable[[_Sample, Tensor | None], None] | None
    input_hooks: Sequence[UncopiedHook]

    def attach(self, module: nn.Module, sample: _Sample, hooks: HookSet) -> None:
        if (hook := self.output_hook) is not None:
            hook.on_call = partial(sample.sites.append, self.site)
            # hooks on outputs outlive the step
            hook.on_grad_output = None if self.on_grad_output is None else partial(self.on_grad_output, sample)
            hooks.add(module.register_forward_hook(hook))
        for input_hook in self.input_hooks:
            hooks.add(module.register_forward_pre_hook(input_hook, with_kwargs=True))


def _modules_to_hook(layers: Sequence[Layer], layout: Layout) -> list[tuple[nn.Module, int, str]]:
    """The modules to be hooked, with their sites and the kinds of the activations among them."""
    found: list[tuple[nn.Module, int, str]] = []
    for layer in layers:
        if layer.hookable:
            found.append((layer.module, layout.index[layer.name], ""))
        for activation in layer.activations:
            if (site := layout.index.get(activation.name)) is not None:
                found.append((activation.module, site, activation.kind))
    return found


def _call_all(callbacks: Sequence[GradOutputCallback], sample: _Sample, gradient: Tensor | None) -> None:
    if gradient is not None and not sample.collected:
        for callback in callbacks:
            callback(gradient)
