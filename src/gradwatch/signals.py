"""The modules' taps: on sampled steps, what flows through layers and activations and in which order they ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from gradwatch.activations import Outputs
from gradwatch.hooks import HookSet
from gradwatch.layers import Layer
from gradwatch.outputs import OutputReading
from gradwatch.record import Floats, Layout
from gradwatch.shards import local
from gradwatch.slab import Parcel
from gradwatch.stats import SAFE_SQUARE, exact_norm, plain

LIMIT = 65_536
"""Signals kept in one step at most: a loop that never steps its optimizer does not fill the memory. Judgement."""


@dataclass(slots=True, eq=False)
class _Basket:
    """What the hooks of one sampled step have gathered; they hold it and nothing else."""

    norms: list[Tensor] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    order: dict[int, None] = field(default_factory=dict)
    """Sites of layers and activations as they first ran in this step."""
    layers: dict[int, None] = field(default_factory=dict)
    """Sites of layers as they first ran, in this step or an earlier one."""
    edge: set[int] = field(default_factory=set)
    """Sites whose last float32 norm was 0, infinite or tiny: measured in float64 next time."""
    seconds: float = 0.0
    troubles: list[Exception] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class SignalReading:
    """The signals of one step, and its forward statistics, under way."""

    layout: Layout
    parcel: Parcel
    sites: list[int]
    sizes: list[int]
    exact: frozenset[int]
    edge: set[int]
    outputs: OutputReading | None = None
    order: tuple[int, ...] = ()
    """Sites of layers and activations in the order in which they first ran in the step."""

    def values(self) -> dict[str, Floats]:
        """Statistic -> one number per site: `signal_norm` and `signal_rms`, NaN for layers without a signal; the
        forward statistics and `run_order`, if they were wanted.

        Several outputs or calls of a layer are one: sqrt(sum |s|^2). Where float32 squares cannot hold a signal, the
        layer has no number at this step and is measured in float64 at the next sample.
        """
        found: dict[str, Floats] = {}
        numbers = self.parcel.open()
        if self.outputs is not None:
            found = self.outputs.values(numbers)
            found["run_order"] = np.full(len(self.layout), np.nan)
            found["run_order"][list(self.order)] = np.arange(len(self.order))
        return found | (self._signals(numbers["signals"]) if "signals" in numbers else {})

    def _signals(self, norms: Floats) -> dict[str, Floats]:
        n = len(self.layout)
        elements = np.bincount(self.sites, weights=self.sizes, minlength=n)
        with np.errstate(invalid="ignore", divide="ignore"):
            total = np.sqrt(np.bincount(self.sites, weights=norms**2, minlength=n))
            total[elements == 0] = np.nan
            edge = np.isinf(total) | (total * total < SAFE_SQUARE * elements)
            for site in np.flatnonzero(edge):
                self.edge.add(int(site))
                if site not in self.exact:
                    total[site] = np.nan
            self.edge.difference_update(np.flatnonzero(~edge).tolist())
            measured = ~np.isnan(total)
            elements[0] = elements[measured].sum()
            total[0] = np.sqrt(np.square(total[measured]).sum()) if elements[0] else np.nan
            return {"signal_norm": total, "signal_rms": total / np.sqrt(elements)}


class Signals:
    """Owns the module hooks; they are there on sampled steps only."""

    def __init__(self) -> None:
        self.hooks = HookSet()
        self._basket = _Basket()
        self._outputs = Outputs()
        self.seconds = 0.0
        """Time spent in the hooks for what was last collected."""

    def arm(
        self,
        layers: Sequence[Layer],
        layout: Layout,
        *,
        backward: bool = True,
        forward: bool = False,
        full: bool = False,
    ) -> None:
        """Tap the outputs of `layers` until `disarm`; what arrives is kept until `collect`. Twice does nothing.

        `backward`: for the signals, `full` by torch's own full backward hooks. `forward`: for the forward statistics,
        of the activations too.
        """
        if len(self.hooks):
            return
        basket, add = self._basket, self.hooks.on_outputs
        try:
            for layer in layers:
                if layer.hookable:
                    site = layout.index[layer.name]
                    tap, mark = _tap(basket, site) if backward else None, _mark(site, basket.order, basket.layers)
                    gave = self._outputs.tap(site, layer.module) if forward else None
                    add(layer.module, tap, mark, gave=gave, full=full, troubles=basket.troubles)
                for activation in layer.activations if forward else ():
                    place = layout.index.get(activation.name)
                    if place is not None:
                        gave = self._outputs.tap(place, activation.module, activation.kind)
                        add(activation.module, None, _mark(place, basket.order), gave=gave, troubles=basket.troubles)
        except BaseException:
            self.disarm()
            raise

    def disarm(self) -> None:
        self.hooks.remove()

    @property
    def troubles(self) -> list[Exception]:
        """What went wrong inside the hooks."""
        return self._basket.troubles

    def order(self) -> tuple[int, ...]:
        """Site indices of the layers in the order in which they first ran."""
        return tuple(self._basket.layers)

    def collect(self, layout: Layout) -> SignalReading | None:
        """What has arrived since `arm`; None if nothing has."""
        basket, outputs = self._basket, self._outputs.collect(layout)
        self.seconds = basket.seconds + self._outputs.seconds
        self._basket = _Basket(edge=basket.edge, layers=basket.layers, troubles=basket.troubles)
        tensors = dict(outputs.tensors) if outputs else {}
        if basket.norms:
            device = next(iter(tensors.values())).device if tensors else basket.norms[0].device
            norms = [norm.to(device, torch.float32, non_blocking=True) for norm in basket.norms]
            tensors["signals"] = torch.stack(norms)
        if not tensors:
            return None
        exact, order = frozenset(basket.edge), tuple(basket.order)
        return SignalReading(layout, Parcel(tensors), basket.sites, basket.sizes, exact, basket.edge, outputs, order)


def _tap(basket: _Basket, site: int) -> Callable[[Tensor], None]:
    def arrived(gradient: Tensor) -> None:
        if len(basket.norms) >= LIMIT:
            return
        begun = perf_counter()
        try:
            gradient = local(gradient.detach())
            if site in basket.edge:
                norm = exact_norm(gradient)
            else:
                values = plain(gradient)
                wide = torch.float64 if values.dtype is torch.float64 else torch.float32
                norm = torch.linalg.vector_norm(values, dtype=wide)
        except Exception as error:  # raised here, it would end the user's backward pass
            basket.troubles.append(error)
            return
        basket.norms.append(norm)
        basket.sites.append(site)
        basket.sizes.append(gradient.numel())
        basket.seconds += perf_counter() - begun

    return arrived


def _mark(site: int, *orders: dict[int, None]) -> Callable[[], None]:
    def ran() -> None:
        for order in orders:
            order.setdefault(site)

    return ran
