"""The forward taps: on sampled steps, outputs of layers and activations become a few numbers each, on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwatch.core.record import Layout
from gradwatch.measure.dtensor import is_dtensor, local_tensor
from gradwatch.measure.modules import LIMIT, Gave
from gradwatch.measure.modules.output_values import OutputReading, Row
from gradwatch.measure.reductions import ONE_SUM, SMALL, here, joined, norm_into, plain, wide_type

RECTIFIERS = frozenset({"ReLU", "ReLU6"})
"""Activations that are never negative and exactly zero where they are off."""

FLAT = {
    "Tanh": (0.0, 0.95**0.5),
    "Sigmoid": (0.5, 0.5 * 0.95**0.5),
    "Softsign": (0.0, 1 - 0.05**0.5),
    "Hardtanh": (0.0, 1 - 2**-6),
    "Hardsigmoid": (0.5, 0.5 - 2**-7),
}
"""Bounded activations: the middle of their range, and how far from it their slope falls under 5 % of its steepest
(tanh' = 1 - y^2, sigmoid' = y (1 - y), softsign' = (1 - |y|)^2). 5 % is a judgement: three such layers in a
row pass on a ten-thousandth, and `vanishing` begins at 3.5 dex. The hard ones have no slope at their ends;
bfloat16 tells 1 from what is 2^-6 less."""

POSITIONS = 16
"""Outputs of a unit in a batch from which on it can be called idle: a live one rests at half of them. Judgement."""

UNITS = 65_536
"""Units of an activation that are told apart at most: four bytes of memory each. Judgement."""

SILENT_SAMPLES = 5
"""Samples in a row through which a dead unit was idle. Judgement: as many as a run begins with."""

WHOLE = 2**24
"""Elements of an output up to which all are counted, in a copy; of larger ones the first examples are. Judgement."""

CHANNELS_SECOND = ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm")
"""What is in the class names of layers after which the units of a tensor of 3 and more dimensions are in its second."""

HEIGHT = 64
"""Small outputs of one shape that are reduced together at most; and so that they stay in a cache, 256 KiB in float32.
Judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class Treatment:
    """What is measured of a tensor. There is one of each kind: they are compared at every output, by identity."""

    row: str = "output"
    rectifies: bool = False
    """Whether it is never negative and exactly zero where its units are off."""
    middle: float = 0.0
    reach: float = 0.0
    """How far from `middle` it is flat; 0 for one that is not bounded."""


PLAIN, INPUT, RECTIFIED = Treatment(), Treatment("input"), Treatment(rectifies=True)


@dataclass(slots=True, eq=False)
class _Pile:
    """Copies of small outputs of one shape, until there are enough of them to be reduced in one go."""

    treatment: Treatment
    channels: bool
    stack: Tensor
    """Shape [height, *shape of an output]."""
    places: tuple[Tensor, ...]
    sites: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Basket:
    """What the taps of one sampled step have gathered; they hold it and nothing else."""

    rows: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    piles: dict[tuple[Any, ...], _Pile] = field(default_factory=dict)
    peaks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Site and number of units -> the highest output of each unit."""
    edge: set[int] = field(default_factory=set)
    """Sites whose last float32 norm squares could not hold: measured in float64 next time."""
    channels: bool = False
    """Whether the last layer that ran has its units in the second dimension."""
    measured: int = 0


class Outputs:
    """The gauge of forward statistics; keeps no output."""

    def __init__(self) -> None:
        self._basket = _Basket()
        self._silent: dict[tuple[int, int], Tensor] = {}
        """Site and number of units -> for how many samples in a row each unit has been idle."""

    def on_output(self, site: int, module: nn.Module, kind: str) -> Gave:
        basket = self._basket
        if kind:
            return _tap_activation(basket, site, _treatment(module, kind))
        return _tap_layer(basket, site, any(part in type(module).__name__ for part in CHANNELS_SECOND))

    def on_signal(self, site: int, module: nn.Module, kind: str) -> None:
        return None

    def on_loss(self, loss: Tensor) -> None: ...

    def collect(self, layout: Layout) -> OutputReading | None:
        basket = self._basket
        for pile in basket.piles.values():
            _reduce_pile(basket, pile)
        self._count_units(basket)
        self._basket = _Basket(edge=basket.edge)
        if not basket.rows:
            return None
        tensors = {name: joined(row.pieces) for name, row in basket.rows.items()}
        return OutputReading(layout, basket.rows, tensors, frozenset(basket.edge), basket.edge)

    def _count_units(self, basket: _Basket) -> None:
        """Which units were idle, all activations of one size in one go."""
        alike: dict[tuple[int, torch.device], list[tuple[int, int]]] = {}
        for key, peak in basket.peaks.items():
            alike.setdefault((key[1], peak.device), []).append(key)
        for (units, device), keys in alike.items():
            peaks = torch.stack([basket.peaks[key] for key in keys])
            before = [self._silent.get(key) for key in keys]
            none = torch.zeros(units, device=device)
            silent = torch.stack([none if known is None else known.to(device) for known in before])
            silent = (silent + 1).mul_(peaks == 0)
            self._silent |= dict(zip(keys, silent, strict=True))
            sites = [site for site, _ in keys]
            basket.rows["idle"].add((silent >= 1).float().sum(1), sites, units)
            basket.rows["dead"].add((silent >= SILENT_SAMPLES).float().sum(1), sites, units)
            basket.rows["output_peak"].add(peaks.amax(1), sites, units)


def _tap_layer(basket: _Basket, site: int, channels: bool) -> Gave:
    def gave(arguments: object, tensors: Iterable[Tensor]) -> None:
        basket.channels = channels
        for value in arguments if isinstance(arguments, tuple) else ():
            if isinstance(value, Tensor) and not value.requires_grad:
                _measure(basket, value, site, INPUT)
        for tensor in tensors:
            _measure(basket, tensor, site, PLAIN)

    return gave


def _tap_activation(basket: _Basket, site: int, treatment: Treatment) -> Gave:
    def gave(arguments: object, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            _measure(basket, tensor, site, treatment)

    return gave


def _treatment(module: nn.Module, kind: str) -> Treatment:
    if isinstance(module, nn.Hardtanh) and kind == "Hardtanh":
        low, high = float(module.min_val), float(module.max_val)
        return _flat((low + high) / 2, (high - low) / 2 * FLAT[kind][1])
    return RECTIFIED if kind in RECTIFIERS else _flat(*FLAT[kind]) if kind in FLAT else PLAIN


@lru_cache(maxsize=256)
def _flat(middle: float, reach: float) -> Treatment:
    return Treatment(middle=middle, reach=reach)


def _measure(basket: _Basket, tensor: Tensor, site: int, treatment: Treatment) -> None:
    """Put the numbers of one tensor into `basket`, or a copy where it is small."""
    if not here(tensor):
        found = _unwrapped(tensor)
        if found is None:
            return
        tensor = found
    size = tensor.numel()
    if size == 0 or basket.measured >= LIMIT:
        return
    basket.measured += 1
    if tensor.requires_grad:
        tensor = tensor.detach()
    if size > SMALL or site in basket.edge:
        _reduce(basket, tensor.unsqueeze(0), (site,), treatment, basket.channels)
        return
    key = treatment, basket.channels, tensor.shape, tensor.dtype, tensor.device
    pile = basket.piles.get(key)
    if pile is None:
        stack = tensor.new_empty((min(HEIGHT, ONE_SUM // size), *tensor.shape))
        pile = basket.piles[key] = _Pile(treatment, basket.channels, stack, stack.unbind())
    pile.places[len(pile.sites)].copy_(tensor)
    pile.sites.append(site)
    if len(pile.sites) == len(pile.places):
        _reduce_pile(basket, pile)


def _reduce_pile(basket: _Basket, pile: _Pile) -> None:
    if pile.sites:
        _reduce(basket, pile.stack[: len(pile.sites)], pile.sites, pile.treatment, pile.channels)
        pile.sites = []


def _reduce(basket: _Basket, stack: Tensor, sites: Sequence[int], treatment: Treatment, channels: bool) -> None:
    """Put the numbers of `stack` [k, *shape of an output] into `basket`, one for each of `sites` [k]."""
    rows, row, size = basket.rows, treatment.row, stack[0].numel()
    rows[row].add(_norms(stack, exact=not basket.edge.isdisjoint(sites)), sites, size)
    units = _units(stack, channels=channels) if treatment.rectifies else None
    if units is None:
        rows[f"{row}_peak"].add(_peaks(stack), sites, size)
    else:
        dims = [dim for dim in range(1, stack.ndim) if dim != units]
        for site, peak in zip(sites, stack.amax(dims).float(), strict=True):
            key = site, len(peak)
            basket.peaks[key] = torch.maximum(basket.peaks[key], peak) if key in basket.peaks else peak
    if treatment.rectifies or treatment.reach:
        some = stack if size <= WHOLE else stack[:, : max(1, WHOLE * stack.shape[1] // size)]
        if treatment.rectifies:
            rows["nonzero"].add(_norms(some.sign()), sites, some[0].numel())
        if treatment.reach:
            far = F.hardshrink(some - treatment.middle if treatment.middle else some, treatment.reach)
            rows["flat"].add(_norms(far.sign_()), sites, some[0].numel())


def _unwrapped(tensor: Tensor) -> Tensor | None:
    """An ordinary tensor with the magnitudes of `tensor`, if it has any."""
    if isinstance(tensor, nn.Parameter):
        tensor = tensor.data
    elif is_dtensor(tensor):
        placements = getattr(tensor, "placements")  # noqa: B009 (only DTensors have them)
        if any(placement.is_partial() for placement in placements):
            return None  # completing it would be a talk among all ranks
        tensor = local_tensor(tensor)
    if type(tensor) is Tensor and tensor.is_complex():
        tensor = plain(tensor.detach())
    return tensor if here(tensor) else None


def _norms(stack: Tensor, *, exact: bool = False) -> Tensor:
    """2-norms of the entries of `stack`, shape [k]; `exact`: in float64."""
    norms: Tensor
    dtype = torch.float64 if exact else wide_type(stack)
    if len(stack) == 1 and stack.numel() > ONE_SUM and not exact:
        norms = torch.empty(1, dtype=dtype, device=stack.device)
        norm_into(stack[0], norms[0])
    elif len(stack) == 1:
        norms = torch.linalg.vector_norm(stack, dtype=dtype).view(1)
    else:
        norms = torch.linalg.vector_norm(stack.reshape(len(stack), -1), dim=1, dtype=dtype)
    return norms


def _peaks(stack: Tensor) -> Tensor:
    """The largest magnitude in each entry of `stack`, shape [k]; NaN where one is in it."""
    if len(stack) == 1:
        return torch.stack(torch.aminmax(stack)).abs_().amax().view(1)
    rows = stack.reshape(len(stack), -1)
    return torch.maximum(rows.amax(1), rows.amin(1).neg_())


def _units(stack: Tensor, *, channels: bool) -> int | None:
    """The dimension of the units: the last, or after convolutions the second of an output. None where no unit can be
    called idle.
    """
    if stack.ndim < 3:
        return None
    dim = 2 if channels and stack.ndim > 3 else stack.ndim - 1
    units = stack.shape[dim]
    return dim if units <= UNITS and stack[0].numel() >= POSITIONS * units else None
