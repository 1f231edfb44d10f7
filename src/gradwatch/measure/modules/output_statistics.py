"""Forward statistics: on sampled steps the outputs of layers and activations are reduced to a few numbers each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.dtensor import is_dtensor, local_tensor
from gradwatch.measure.modules import LIMIT, ModuleStatistic, OutputCallback
from gradwatch.measure.reductions import (
    ONE_SUM,
    SAFE_SQUARE,
    SMALL,
    dense_real,
    is_dense_real,
    joined,
    norm_into,
    wide_type,
)

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
"""Outputs of a unit in a batch from which on it can be called idle: an active one is 0 in half of them. Judgement."""

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


Sites = NDArray[np.intp]

NOWHERE: Sites = np.zeros(0, dtype=np.intp)


@dataclass(slots=True, eq=False)
class Row:
    """Numbers of one kind on the device, in pieces of shape [k]: of which sites, and of how many elements."""

    pieces: list[Tensor] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, numbers: Tensor, sites: Sequence[int], size: int) -> None:
        self.pieces.append(numbers)
        self.sites += sites
        self.sizes += [size] * len(sites)


@dataclass(frozen=True, slots=True, eq=False)
class OutputReading:
    """The forward statistics of one step, under way: `tensors`, 1-d, are to be brought to the host."""

    layout: Layout
    rows: Mapping[str, Row]
    tensors: Mapping[str, Tensor]
    exact: frozenset[int]
    unsafe: set[int]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """Statistic -> one number per site, NaN where not measured. `numbers`: what `tensors` were on the device.

        Several outputs or calls of a module are one: root mean squares and shares over all elements, the largest of the
        maxima. Where float32 squares cannot hold an output, it has no root mean square at this step and is measured
        in float64 at the next sample.
        """
        found: dict[str, Floats] = {}
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            for row in ("output", "input"):
                if row in numbers:
                    largest = found[f"{row}_max"] = self._largest(f"{row}_peak", numbers[f"{row}_peak"])
                    found[f"{row}_rms"] = self._rms(row, numbers[row], largest)
            # a sum of ones, as a norm: the square is their number
            bad = np.flatnonzero(found["output_max"] == np.inf) if "output" in numbers else NOWHERE
            if "nonzero" in numbers:
                found["zero_share"] = 1.0 - self._share("nonzero", numbers["nonzero"] ** 2, without=bad)
            if "flat" in numbers:
                found["saturated"] = self._share("flat", numbers["flat"] ** 2, without=bad)
            for row, statistic in (("idle", "idle_units"), ("dead", "dead_units")):
                if row in numbers:
                    found[statistic] = self._share(row, numbers[row])
        return found

    def _sums(self, row: str, numbers: Floats, *, without: Sites = NOWHERE) -> tuple[Floats, Floats]:
        """Sums of `numbers` and of their elements over each site, 0 for those `without`; the total's is over all."""
        n, entries = len(self.layout), self.rows[row]
        sums = np.bincount(entries.sites, weights=numbers, minlength=n).astype(np.float64, copy=False)
        sizes = np.bincount(entries.sites, weights=entries.sizes, minlength=n).astype(np.float64, copy=False)
        sums[without] = sizes[without] = 0.0
        sums[0], sizes[0] = sums.sum(), sizes.sum()
        return sums, sizes

    def _share(self, row: str, counts: Floats, *, without: Sites = NOWHERE) -> Floats:
        """`without`: sites with an output that is not finite, as NaN has no sign and so would count as zero."""
        sums, sizes = self._sums(row, counts, without=without)
        return sums / sizes

    def _largest(self, row: str, numbers: Floats) -> Floats:
        found = np.full(len(self.layout), -1.0)
        np.maximum.at(found, self.rows[row].sites, np.where(np.isnan(numbers), np.inf, numbers))
        found[0] = found.max(initial=-1.0)
        found[found < 0] = np.nan
        return found

    def _rms(self, row: str, norms: Floats, largest: Floats) -> Floats:
        sums, sizes = self._sums(row, norms**2)
        rms: Floats = np.sqrt(sums / sizes)
        rms[largest == np.inf] = np.inf
        out = (largest < np.inf) & (~np.isfinite(sums) | ((largest > 0) & (sums < SAFE_SQUARE * sizes)))
        out[0] = False
        self.unsafe.update(np.flatnonzero(out).tolist())
        out[list(self.exact)] = False
        rms[out] = np.nan
        return rms


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
class _StepOutputs:
    """What the hooks of one sampled step have measured. They hold it and nothing else."""

    rows: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    piles: dict[tuple[Any, ...], _Pile] = field(default_factory=dict)
    peaks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Site and number of units -> the highest output of each unit."""
    unsafe: set[int] = field(default_factory=set)
    """Sites whose last float32 norm squares could not hold: measured in float64 next time."""
    channels: bool = False
    """Whether the last layer that ran has its units in the second dimension."""
    measured: int = 0


class OutputStatistics(ModuleStatistic):
    """The statistic of forward statistics; keeps no output."""

    def __init__(self) -> None:
        self._step = _StepOutputs()
        self._silent: dict[tuple[int, int], Tensor] = {}
        """Site and number of units -> for how many samples in a row each unit has been idle."""

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback:
        step = self._step
        if kind:
            return _activation_callback(step, site, _treatment(module, kind))
        return _layer_callback(step, site, any(part in type(module).__name__ for part in CHANNELS_SECOND))

    def collect(self, layout: Layout) -> OutputReading | None:
        step = self._step
        for pile in step.piles.values():
            _reduce_pile(step, pile)
        self._count_units(step)
        self._step = _StepOutputs(unsafe=step.unsafe)
        if not step.rows:
            return None
        tensors = {name: joined(row.pieces) for name, row in step.rows.items()}
        return OutputReading(layout, step.rows, tensors, frozenset(step.unsafe), step.unsafe)

    def _count_units(self, step: _StepOutputs) -> None:
        """Which units were idle, all activations of one size in one go."""
        alike: dict[tuple[int, torch.device], list[tuple[int, int]]] = {}
        for key, peak in step.peaks.items():
            alike.setdefault((key[1], peak.device), []).append(key)
        for (units, device), keys in alike.items():
            peaks = torch.stack([step.peaks[key] for key in keys])
            before = [self._silent.get(key) for key in keys]
            none = torch.zeros(units, device=device)
            silent = torch.stack([none if known is None else known.to(device) for known in before])
            silent = (silent + 1).mul_(peaks == 0)
            self._silent |= dict(zip(keys, silent, strict=True))
            sites = [site for site, _ in keys]
            step.rows["idle"].add((silent >= 1).float().sum(1), sites, units)
            step.rows["dead"].add((silent >= SILENT_SAMPLES).float().sum(1), sites, units)
            step.rows["output_peak"].add(peaks.amax(1), sites, units)


def _layer_callback(step: _StepOutputs, site: int, channels: bool) -> OutputCallback:
    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        step.channels = channels
        for value in arguments if isinstance(arguments, tuple) else ():
            if isinstance(value, Tensor) and not value.requires_grad:
                _measure(step, value, site, INPUT)
        for tensor in tensors:
            _measure(step, tensor, site, PLAIN)

    return on_output


def _activation_callback(step: _StepOutputs, site: int, treatment: Treatment) -> OutputCallback:
    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            _measure(step, tensor, site, treatment)

    return on_output


def _treatment(module: nn.Module, kind: str) -> Treatment:
    if isinstance(module, nn.Hardtanh) and kind == "Hardtanh":
        low, high = float(module.min_val), float(module.max_val)
        return _flat((low + high) / 2, (high - low) / 2 * FLAT[kind][1])
    return RECTIFIED if kind in RECTIFIERS else _flat(*FLAT[kind]) if kind in FLAT else PLAIN


@lru_cache(maxsize=256)
def _flat(middle: float, reach: float) -> Treatment:
    return Treatment(middle=middle, reach=reach)


def _measure(step: _StepOutputs, tensor: Tensor, site: int, treatment: Treatment) -> None:
    """Put the numbers of one tensor into `step`, or a copy where it is small."""
    if not is_dense_real(tensor):
        found = _unwrapped(tensor)
        if found is None:
            return
        tensor = found
    size = tensor.numel()
    if size == 0 or step.measured >= LIMIT:
        return
    step.measured += 1
    if tensor.requires_grad:
        tensor = tensor.detach()
    if size > SMALL or site in step.unsafe:
        _reduce(step, tensor.unsqueeze(0), (site,), treatment, step.channels)
        return
    key = treatment, step.channels, tensor.shape, tensor.dtype, tensor.device
    pile = step.piles.get(key)
    if pile is None:
        stack = tensor.new_empty((min(HEIGHT, ONE_SUM // size), *tensor.shape))
        pile = step.piles[key] = _Pile(treatment, step.channels, stack, stack.unbind())
    pile.places[len(pile.sites)].copy_(tensor)
    pile.sites.append(site)
    if len(pile.sites) == len(pile.places):
        _reduce_pile(step, pile)


def _reduce_pile(step: _StepOutputs, pile: _Pile) -> None:
    if pile.sites:
        _reduce(step, pile.stack[: len(pile.sites)], pile.sites, pile.treatment, pile.channels)
        pile.sites = []


def _reduce(step: _StepOutputs, stack: Tensor, sites: Sequence[int], treatment: Treatment, channels: bool) -> None:
    """Put the numbers of `stack` [k, *shape of an output] into `step`, one for each of `sites` [k]."""
    rows, row, size = step.rows, treatment.row, stack[0].numel()
    rows[row].add(_norms(stack, exact=not step.unsafe.isdisjoint(sites)), sites, size)
    units = _units(stack, channels=channels) if treatment.rectifies else None
    if units is None:
        rows[f"{row}_peak"].add(_peaks(stack), sites, size)
    else:
        dims = [dim for dim in range(1, stack.ndim) if dim != units]
        for site, peak in zip(sites, stack.amax(dims).float(), strict=True):
            key = site, len(peak)
            step.peaks[key] = torch.maximum(step.peaks[key], peak) if key in step.peaks else peak
    if treatment.rectifies or treatment.reach:
        some = stack if size <= WHOLE else stack[:, : max(1, WHOLE * stack.shape[1] // size)]
        if treatment.rectifies:
            rows["nonzero"].add(_norms(some.sign()), sites, some[0].numel())
        if treatment.reach:
            far = F.hardshrink(some - treatment.middle if treatment.middle else some, treatment.reach)
            rows["flat"].add(_norms(far.sign_()), sites, some[0].numel())


def _unwrapped(tensor: Tensor) -> Tensor | None:
    """An is_hookable tensor with the magnitudes of `tensor`, if it has any."""
    if isinstance(tensor, nn.Parameter):
        tensor = tensor.data
    elif is_dtensor(tensor):
        placements = getattr(tensor, "placements")  # noqa: B009 (only DTensors have them)
        if any(placement.is_partial() for placement in placements):
            return None  # completing it would be a talk among all ranks
        tensor = local_tensor(tensor)
    if type(tensor) is Tensor and tensor.is_complex():
        tensor = dense_real(tensor.detach())
    return tensor if is_dense_real(tensor) else None


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
