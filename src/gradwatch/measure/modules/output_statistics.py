"""Forward statistics: on sampled steps the outputs of layers and activations are reduced to a few numbers each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.dtensor import is_dtensor, is_partial, local_tensor
from gradwatch.measure.modules import MAX_TENSORS, ModuleReading, ModuleStatistic, OutputCallback
from gradwatch.measure.modules.hooked_views import wants_gradient
from gradwatch.measure.reductions import (
    ONE_SUM,
    SAFE_SQUARE,
    SMALL,
    dense_real,
    exact_norm,
    is_dense_real,
    joined,
    norm,
    wide_type,
)

RECTIFIERS = frozenset({"ReLU", "ReLU6"})
"""Activations that are never negative and exactly zero where they are off."""

FLAT_PARTS = {
    "Tanh": (0.0, 0.95**0.5),
    "Sigmoid": (0.5, 0.5 * 0.95**0.5),
    "Softsign": (0.0, 1 - 0.05**0.5),
    "Hardtanh": (0.0, 1 - 2**-6),
    "Hardsigmoid": (0.5, 0.5 - 2**-7),
}
"""Bounded activations: the middle of their range, and how far from it their slope falls under 5 % of its steepest
(tanh' = 1 - y^2, sigmoid' = y (1 - y), softsign' = (1 - |y|)^2). 5 % is a judgement: three such layers in a
row pass on a ten-thousandth, and `vanishing` begins at 3.5 dex. The slope of the hard ones is 0 beyond their ends, and
bfloat16 tells 1 from 1 - 2^-6."""

MIN_POSITIONS = 16
"""Outputs of a unit in a batch, at least, for it to count as idle: an active one is 0 in half of them. Judgement."""

MAX_UNITS = 65_536
"""Units of an activation that are counted one by one, at most: four bytes of memory each. Judgement."""

DEAD_AFTER_SAMPLES = 5
"""Consecutive samples in which a dead unit was idle. Judgement: as many as a run begins with."""

MAX_COUNTED = 2**24
"""Elements of an output that are counted, at most; of larger outputs those of the first examples. Judgement."""

CHANNELS_SECOND = ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm")
"""Parts of the class names of layers whose outputs with 3 or more dimensions have their units in the second."""

MAX_STACKED = 64
"""Small outputs of one shape that are reduced together, at most; they also stay within 256 KiB in float32, a cache.
Judgement."""

SMALL_ELSEWHERE, STACK_ELSEWHERE = 2**16, 2**20
"""On accelerators: elements up to which an output is small, and of those that are reduced together. A launch there
takes longer than a copy of 256 KiB; the stack of each shape takes 4 MiB at most. Judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorKind:
    """Which numbers are measured of a tensor. One object per kind: they are compared at every output, by identity."""

    row: str = "output"
    """"output", or "input" for the input of a layer: the row of the norms."""
    peak: str = "output_peak"
    """The row of the lowest and highest numbers, from which the largest magnitude follows."""
    rectifies: bool = False
    """Whether it is the output of one of `RECTIFIERS`."""
    middle: float = 0.0
    reach: float = 0.0
    """How far from `middle` it is flat; 0 for one that is not bounded."""


OUTPUT, RECTIFIED_OUTPUT = TensorKind(), TensorKind(rectifies=True)
LAYER_INPUT = TensorKind("input", "input_peak")

SHARES = {"nonzero": "zero_share", "flat": "saturated", "idle": "idle_units", "dead": "dead_units"}
"""Rows of numbers of elements -> the statistics that follow; of zeros, those that are none are counted."""

COUNTS = ("idle", "dead")
"""Those whose numbers are counts, not norms of ones."""


Row = list[tuple[Tensor, Sequence[int], int]]
"""Numbers of one kind on the device, one, 0-d, or shape [k]; in one with the site of each and the elements that each is
of: replicas of a model may run in threads.
"""


@dataclass(slots=True, eq=False)
class _OutputStack:
    """Copies of small outputs of one shape, which are reduced together."""

    tensor_kind: TensorKind
    channels: bool
    height: int
    stack: Tensor
    """Shape [height, *shape of an output]."""
    sites: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _StepOutputs:
    """What has been measured in one sampled step."""

    rows: dict[str, Row] = field(default_factory=lambda: defaultdict(list))
    stacks: dict[tuple[Any, ...], _OutputStack] = field(default_factory=dict)
    unit_peaks: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)
    """Sites, and the highest output of each unit of each, shape [sites, units]; a site may come several times."""
    unmeasured: set[int] = field(default_factory=set)
    """Layers with a call whose input was not measured."""
    unsafe: set[int] = field(default_factory=set)
    """Sites of which float32 squares could not hold a norm: measured in float64 from then on."""
    channels: bool = False
    """Whether the last layer that ran has its units in the second dimension."""
    measured: int = 0


class OutputStatistics(ModuleStatistic):
    """Root mean squares, maxima, zeros, saturation and idle units of outputs and inputs; keeps no output."""

    def __init__(self) -> None:
        self.step = _StepOutputs()
        self._idle_samples: dict[tuple[int, int], Tensor] = {}
        """Site and number of units -> for how many samples in a row each unit has been idle."""

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback:
        if kind:
            return partial(self._measure_activation, site, _kind_of_output(module, kind))
        channels = any(part in type(module).__name__ for part in CHANNELS_SECOND)
        recurrent = isinstance(module, (nn.RNNBase, nn.RNNCellBase))
        return partial(self._measure_layer, site, channels, recurrent)

    def _measure_layer(
        self, site: int, channels: bool, recurrent: bool, arguments: object, tensors: Iterable[Tensor]
    ) -> None:
        """`recurrent`: whether only the first argument is an input, and the others are states."""
        step = self.step
        step.channels = channels
        given = arguments if isinstance(arguments, tuple) else ()
        inputs = [*filter(torch.is_tensor, given[:1] if recurrent else given)]
        # beside what other layers made there are masks and states
        if inputs and not any(map(wants_gradient, inputs)):
            for value in inputs:
                _measure(step, value, site, LAYER_INPUT)
        else:
            step.unmeasured.add(site)
        for tensor in tensors:
            _measure(step, tensor, site, OUTPUT)

    def _measure_activation(
        self, site: int, tensor_kind: TensorKind, arguments: object, tensors: Iterable[Tensor]
    ) -> None:
        for tensor in tensors:
            _measure(self.step, tensor, site, tensor_kind)

    def collect(self, layout: Layout) -> ModuleReading | None:
        step = self.step
        for waiting in step.stacks.values():
            _reduce_stack(step, waiting)
        self._count_units(step)
        self.step = _StepOutputs(unsafe=step.unsafe)
        if not step.rows:
            return None
        # row by row: the numbers of a row are mostly of one type
        numbers = {"outputs": joined([joined([*map(itemgetter(0), row)]) for row in step.rows.values()])}
        exact = frozenset(step.unsafe)
        return ModuleReading(
            numbers, partial(_values, len(layout.sites), step.rows, step.unsafe, exact, step.unmeasured)
        )

    def _count_units(self, step: _StepOutputs) -> None:
        """Count the idle and the dead units, all activations of one size together."""
        alike: dict[tuple[int, torch.device, torch.dtype], list[tuple[Sequence[int], Tensor]]] = {}
        for sites, peaks in step.unit_peaks:
            alike.setdefault((peaks.shape[1], peaks.device, peaks.dtype), []).append((sites, peaks))
        for (units, device, _), rows in alike.items():
            sites = [site for own, _ in rows for site in own]
            unit_peaks = torch.cat([peaks for _, peaks in rows]).float()
            if len(set(sites)) < len(sites):
                sites, unit_peaks = _highest(sites, unit_peaks)
            keys = [(site, units) for site in sites]
            none = torch.zeros(units, device=device)
            before = [self._idle_samples.get(key, none).to(device) for key in keys]
            idle = unit_peaks == 0
            samples = torch.stack(before).add_(1).mul_(idle)
            self._idle_samples |= dict(zip(keys, samples.unbind(), strict=True))
            step.rows["idle"].append((idle.sum(1, dtype=torch.float32), sites, units))
            step.rows["dead"].append(((samples >= DEAD_AFTER_SAMPLES).sum(1, dtype=torch.float32), sites, units))
            step.rows["output_peak"].append((unit_peaks.amax(1), sites, units))


def _values(
    n: int,
    rows_of: Mapping[str, Row],
    unsafe: set[int],
    exact: frozenset[int],
    unmeasured: set[int],
    numbers: Mapping[str, Floats],
) -> dict[str, Floats]:
    """Statistic -> one number for each of `n` sites, NaN where not measured.

    Root mean squares, shares and maxima are taken over all outputs and calls of a module. An output whose squares
    float32 cannot hold has no root mean square at this step, nor has the total if that counts for it: it is `unsafe`,
    and measured in float64 from the next sample on, at which it is `exact`. Of a layer of which the input of another
    call is `unmeasured`, an input of zeros is not said.
    """
    rows = {name: line for line, name in enumerate(rows_of)}
    found: dict[str, Floats] = {}
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        sums, elements, largest = _by_site(n, rows_of, numbers["outputs"])
        norms_of_ones = [line for row, line in rows.items() if row in SHARES and row not in COUNTS]
        if norms_of_ones:  # NaN would count as zero
            bad = largest[rows["output_peak"]] == np.inf
            sums[np.ix_(norms_of_ones, bad)] = elements[np.ix_(norms_of_ones, bad)] = 0.0
        sums[:, 0], elements[:, 0] = sums[:, 1:].sum(axis=1), elements[:, 1:].sum(axis=1)
        means = sums / elements
        for row in ("output", "input"):
            if row in rows:
                line, peaks = rows[row], largest[rows[f"{row}_peak"]]
                rms = np.sqrt(means[line])
                rms[peaks == np.inf] = np.inf
                tiny = (peaks > 0) & (sums[line] < SAFE_SQUARE * elements[line])
                out = (peaks < np.inf) & (~np.isfinite(sums[line]) | tiny)
                unsafe.update((np.flatnonzero(out[1:]) + 1).tolist())
                out[list(exact)] = False
                out[0] &= out[1:].any()
                rms[out] = np.nan
                if row == "input":
                    others = np.array(sorted(unmeasured), dtype=np.intp)
                    others = others[peaks[others] == 0]
                    rms[others] = peaks[others] = np.nan
                found |= {f"{row}_max": peaks, f"{row}_rms": rms}
    for row, statistic in SHARES.items():
        if row in rows:
            found[statistic] = 1.0 - means[rows[row]] if row == "nonzero" else means[rows[row]]
    return found


def _by_site(n: int, rows_of: Mapping[str, Row], each: Floats) -> tuple[Floats, Floats, Floats]:
    """Sums (of squares, but for `COUNTS`), numbers of elements and largest magnitudes of the numbers `each`, shape
    [rows, n]; of the total the largest alone.
    """
    pieces = [(line, own, size) for line, row in enumerate(rows_of.values()) for _, own, size in row]
    line_of_piece, sites_of_piece, size_of_piece = zip(*pieces, strict=True)
    lengths = [*map(len, sites_of_piece)]
    lines, sizes = np.repeat(line_of_piece, lengths), np.repeat(size_of_piece, lengths)
    cells, shape = np.array([*chain.from_iterable(sites_of_piece)]) + n * lines, (len(rows_of), n)
    # the square of a norm of ones is their number
    amounts = np.where(np.array([row in COUNTS for row in rows_of])[lines], each, each**2)
    sums, elements = (
        np.bincount(cells, weights, n * len(rows_of)).astype(np.float64, copy=False).reshape(shape)
        for weights in (amounts, sizes)
    )
    largest = np.full(shape, -1.0)
    np.maximum.at(largest.reshape(-1), cells, np.where(np.isnan(each), np.inf, np.abs(each)))
    largest[:, 0] = largest.max(axis=1)
    largest[largest < 0] = np.nan
    return sums, elements, largest


def _highest(sites: Sequence[int], peaks: Tensor) -> tuple[list[int], Tensor]:
    """Each site once, and the highest of its rows of `peaks`."""
    rows: dict[int, list[int]] = {}
    for row, site in enumerate(sites):
        rows.setdefault(site, []).append(row)
    each = peaks.unbind()
    highest = [
        torch.stack([each[row] for row in own]).amax(0) if len(own) > 1 else each[own[0]] for own in rows.values()
    ]
    return list(rows), torch.stack(highest)


def _kind_of_output(module: nn.Module, kind: str) -> TensorKind:
    if isinstance(module, nn.Hardtanh) and kind == "Hardtanh":
        low, high = float(module.min_val), float(module.max_val)
        return _flat((low + high) / 2, (high - low) / 2 * FLAT_PARTS[kind][1])
    return RECTIFIED_OUTPUT if kind in RECTIFIERS else _flat(*FLAT_PARTS[kind]) if kind in FLAT_PARTS else OUTPUT


@lru_cache(maxsize=256)
def _flat(middle: float, reach: float) -> TensorKind:
    return TensorKind(middle=middle, reach=reach)


def _measure(step: _StepOutputs, tensor: Tensor, site: int, tensor_kind: TensorKind) -> None:
    """Add the numbers of one tensor to `step`, or a copy of it where it is small."""
    if not is_dense_real(tensor):
        found = _unwrapped(tensor)
        if found is None:
            return
        tensor = found
    size = tensor.numel()
    if size == 0 or step.measured >= MAX_TENSORS:
        return
    step.measured += 1
    tensor = tensor.detach()  # from its graph and from forward-mode AD, which torch 2.6 lacks for `aminmax`
    small, room = (SMALL, ONE_SUM) if tensor.is_cpu else (SMALL_ELSEWHERE, STACK_ELSEWHERE)
    if size > small or tensor_kind is LAYER_INPUT or site in step.unsafe:  # few layers have an input from outside
        _reduce_one(step, tensor, site, tensor_kind)
        return
    key = tensor_kind, step.channels, tensor.shape, tensor.dtype, tensor.device
    waiting = step.stacks.get(key)
    if waiting is None:
        height = min(MAX_STACKED, room // size)
        stack = tensor.new_empty((height, *tensor.shape))
        waiting = step.stacks[key] = _OutputStack(tensor_kind, step.channels, height, stack)
    waiting.stack[len(waiting.sites)].copy_(tensor)
    waiting.sites.append(site)
    if len(waiting.sites) == waiting.height:
        _reduce_stack(step, waiting)


def _reduce_one(step: _StepOutputs, tensor: Tensor, site: int, tensor_kind: TensorKind) -> None:
    """Add the numbers of one output to `step`, each by one kernel where that is possible."""
    rows, size = step.rows, tensor.numel()
    own = (site,)
    rows[tensor_kind.row].append(((exact_norm if site in step.unsafe else norm)(tensor), own, size))
    units = _units(tensor, 0, channels=step.channels) if tensor_kind.rectifies else None
    if units is not None:
        dims = [dim for dim in range(tensor.ndim) if dim != units]
        step.unit_peaks.append((own, tensor.amax(dims).unsqueeze(0)))
    elif tensor_kind.rectifies:
        rows[tensor_kind.peak].append((tensor.amax(), own, size))
    else:
        rows[tensor_kind.peak] += [(number, own, size) for number in torch.aminmax(tensor)]
    if tensor_kind.rectifies or tensor_kind.reach:
        some = tensor if size <= MAX_COUNTED else tensor[: max(1, MAX_COUNTED * len(tensor) // size)]
        name, ones = _ones(some, tensor_kind)
        rows[name].append((norm(ones), own, some.numel()))


def _reduce_stack(step: _StepOutputs, waiting: _OutputStack) -> None:
    """Add the numbers of the outputs that are waiting to `step`, one for each of their sites."""
    sites, waiting.sites = waiting.sites, []
    if not sites:
        return
    stack, tensor_kind, rows = waiting.stack[: len(sites)], waiting.tensor_kind, step.rows
    size = stack.numel() // len(sites)
    flat = stack.view(len(sites), -1)
    rows[tensor_kind.row].append((torch.linalg.vector_norm(flat, dim=1, dtype=wide_type(stack)), sites, size))
    units = _units(stack, 1, channels=waiting.channels) if tensor_kind.rectifies else None
    if units is not None:
        dims = [dim for dim in range(1, stack.ndim) if dim != units]
        step.unit_peaks.append((sites, stack.amax(dims)))
    elif tensor_kind.rectifies:
        rows[tensor_kind.peak].append((flat.amax(1), sites, size))
    else:
        rows[tensor_kind.peak] += [(flat.amin(1), sites, size), (flat.amax(1), sites, size)]
    if tensor_kind.rectifies or tensor_kind.reach:
        name, ones = _ones(flat, tensor_kind)
        rows[name].append((torch.linalg.vector_norm(ones, dim=1, dtype=wide_type(ones)), sites, size))


def _ones(tensor: Tensor, tensor_kind: TensorKind) -> tuple[str, Tensor]:
    """1 or -1 where an output counts, otherwise 0; and the row of the square root of their number."""
    if tensor_kind.rectifies:
        return "nonzero", tensor.sign()
    far = F.hardshrink(tensor - tensor_kind.middle if tensor_kind.middle else tensor, tensor_kind.reach)
    return "flat", far.sign_()


def _unwrapped(tensor: Tensor) -> Tensor | None:
    """A dense real tensor with the magnitudes of `tensor`; None where there is none."""
    if isinstance(tensor, nn.Parameter):
        tensor = tensor.data
    elif is_dtensor(tensor):
        if is_partial(tensor):
            return None  # completing the sum takes a collective call
        tensor = local_tensor(tensor)
    if type(tensor) is Tensor and tensor.is_complex():
        tensor = dense_real(tensor.detach())
    return tensor if is_dense_real(tensor) else None


def _units(tensor: Tensor, first: int, *, channels: bool) -> int | None:
    """The dimension of the units in `tensor`: the last, or after convolutions the second of an output. None where there
    are too many units, or too few outputs of each. `first`: the first dimension of an output; 1 in a stack of them.
    """
    if tensor.ndim - first < 2:
        return None
    dim = first + 1 if channels else tensor.ndim - 1
    units, size = tensor.shape[dim], tensor.numel() // (tensor.shape[0] if first else 1)
    return dim if units <= MAX_UNITS and size >= MIN_POSITIONS * units else None
