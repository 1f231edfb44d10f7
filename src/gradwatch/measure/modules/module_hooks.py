"""The modules' taps: on sampled steps, gauges see what flows through layers and activations, in the order they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.hooks.hook_set import Account, HookSet
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.measure.layers import Layer
from gradwatch.measure.modules import Arrived, Gave, ModuleReading, ModuleStatistic
from gradwatch.measure.modules.input_hooks import Arguments, Entering, InputHook, at_inputs


@dataclass(slots=True, eq=False)
class _Basket:
    """What one sampled step tells besides the gauges' numbers."""

    order: dict[int, None] = field(default_factory=dict)
    """Sites of layers and activations as they first ran in this step."""
    arming: float = 0.0
    """Seconds in which the hooks were put there."""


@dataclass(frozen=True, slots=True, eq=False)
class SignalReading:
    """What the gauges have measured in one step, under way."""

    layout: Layout
    host_copy: HostCopy
    readings: Sequence[ModuleReading]
    order: tuple[int, ...] = ()
    """Sites of layers and activations in the order in which they first ran in the step."""

    def values(self) -> dict[str, Floats]:
        """Statistic -> one number per site: those of all gauges, and `run_order`."""
        numbers = self.host_copy.wait()
        found: dict[str, Floats] = {"run_order": np.full(len(self.layout), np.nan)}
        found["run_order"][list(self.order)] = np.arange(len(self.order))
        for reading in self.readings:
            found |= reading.values(numbers)
        return found


class Signals:
    """Owns the module hooks; they are there on sampled steps only."""

    def __init__(self, gauges: Sequence[ModuleStatistic], inlets: Sequence[InputHook], account: Account) -> None:
        """`account`: of all these hooks, and those of the gauges."""
        self.hooks = HookSet()
        self.gauges = gauges
        self.inlets = inlets
        self._basket = _Basket()
        self._layers: dict[int, None] = {}
        """Sites of layers in the order in which they first ran, in the last step or an earlier one."""
        self._account = account
        self.arming = 0.0
        """Seconds that it took to put the hooks there for what was last collected."""

    def arm(self, layers: Sequence[Layer], layout: Layout, *, full: bool = False) -> None:
        """Show the gauges the outputs of `layers` and their activations, and the signals of those, and the inlets what
        `layers` are given, until `disarm`; what they measure is kept until `collect`. Twice does nothing.

        `full`: signals by torch's own full backward hooks.
        """
        if len(self.hooks):
            return
        begun = perf_counter()
        try:
            for layer in layers:
                if layer.hookable:
                    site = layout.index[layer.name]
                    self._tap(layer.module, site, "", full=full)
                    self._tap_inputs(layer.module, site)
                for activation in layer.activations:
                    place = layout.index.get(activation.name)
                    if place is not None:
                        self._tap(activation.module, place, activation.kind, full=full)
        except BaseException:
            self.disarm()
            raise
        self._basket.arming += perf_counter() - begun

    def _tap(self, module: nn.Module, site: int, kind: str, *, full: bool) -> None:
        gave = [tap for gauge in self.gauges if (tap := gauge.on_output(site, module, kind)) is not None]
        arrived = [hear for gauge in self.gauges if (hear := gauge.on_signal(site, module, kind)) is not None]
        if gave or arrived or not kind:
            outputs = _all_outputs(gave) if gave else None
            signals = _all_signals(self._account, arrived) if arrived else None
            ran = partial(self._basket.order.setdefault, site)
            self.hooks.on_outputs(module, signals, ran, gave=outputs, full=full, account=self._account)

    def _tap_inputs(self, module: nn.Module, site: int) -> None:
        for inlet in self.inlets:
            if (entering := inlet.on_input(site, module)) is not None:
                self.hooks.add(at_inputs(module, _timed(self._account, entering), self._account.errors))

    def disarm(self) -> None:
        self.hooks.remove()

    def begin_at(self, loss: Tensor) -> None:
        """A backward pass begins at `loss`."""
        for gauge in self.gauges if len(self.hooks) else ():
            gauge.on_loss(loss)

    def order(self) -> tuple[int, ...]:
        """Site indices of the layers in the order in which they first ran, up to the last `collect`."""
        return tuple(self._layers)

    def collect(self, layout: Layout) -> SignalReading | None:
        """What has been measured since `arm`; None if nothing has."""
        basket, self._basket = self._basket, _Basket()
        self.arming = basket.arming
        self._layers |= dict.fromkeys(site for site in basket.order if layout.sites[site].kind == "layer")
        readings = [reading for gauge in self.gauges if (reading := gauge.collect(layout)) is not None]
        tensors = {name: tensor for reading in readings for name, tensor in reading.tensors.items()}
        if not tensors:
            return None
        device = next(iter(tensors.values())).device
        host_copy = HostCopy({name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})
        return SignalReading(layout, host_copy, readings, tuple(basket.order))


def _all_outputs(gauges: Sequence[Gave]) -> Gave:
    def gave(arguments: object, tensors: Iterable[Tensor]) -> None:
        for each in gauges:
            each(arguments, tensors)

    return gave if len(gauges) > 1 else gauges[0]


def _timed(account: Account, entering: Entering) -> Entering:
    def entered(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Arguments | None:
        begun = perf_counter()
        given = entering(arguments, keywords)
        account.under_way += perf_counter() - begun
        return given

    return entered


def _all_signals(account: Account, gauges: Sequence[Arrived]) -> Callable[[Tensor | None], None]:
    def arrived(gradient: Tensor | None) -> None:
        if gradient is None:
            return
        begun = perf_counter()
        try:
            for each in gauges:
                each(gradient)
        except Exception as error:  # raised here, it would end the user's backward pass
            account.errors.append(error)
        account.under_way += perf_counter() - begun

    return arrived
