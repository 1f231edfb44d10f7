"""The numbers of a run on the host: what the sites are, and one record per optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TOTAL = "total"
"""Name of site 0: everything that is watched, taken together. A layer of that name hides it, but not from `series`."""

ROOT = "(root)"
"""Name of the layer whose parameters are owned by the model itself; `series` also takes its dotted name, ''."""

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def any_known(numbers: Floats) -> bool:
    """Whether there is any number in `numbers`, one per site, and not NaN alone."""
    # mostly the total says it, in a hundredth of the time
    return bool(numbers[0] == numbers[0]) or not bool(np.isnan(numbers).all())


def as_float32(numbers: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """`numbers` rounded to float32. What float32 cannot hold becomes the nearest number that is neither zero nor
    infinite: rules take either for a fault.
    """
    limits = np.finfo(np.float32)
    if numbers.size and limits.tiny < numbers.min() and numbers.max() < limits.max:
        return numbers.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        rounded = numbers.astype(np.float32)
    overflown = np.isinf(rounded) & np.isfinite(numbers)
    lost = (rounded == 0) & (numbers != 0)
    rounded[overflown] = np.copysign(limits.max, numbers[overflown])
    rounded[lost] = np.copysign(limits.smallest_subnormal, numbers[lost])
    return rounded


class Missing(IntEnum):
    """Why a site has no number in a record; `MEASURED` where it has one."""

    MEASURED = 0
    NOT_SAMPLED = 1
    FROZEN = 2
    NO_GRADIENT = 3
    OTHER_OPTIMIZER = 4
    NO_OPTIMIZER = 5
    LAZY = 6
    UNMEASURABLE = 7
    NO_PARAMETERS = 8

    @property
    def reason(self) -> str:
        return _REASONS[self]


_REASONS = {
    Missing.MEASURED: "measured",
    Missing.NOT_SAMPLED: "not sampled at this step",
    Missing.FROZEN: "frozen (requires_grad is False)",
    Missing.NO_GRADIENT: "no gradient (unused or detached)",
    Missing.OTHER_OPTIMIZER: "belongs to another optimizer",
    Missing.NO_OPTIMIZER: "in no optimizer",
    Missing.LAZY: "not materialised yet",
    Missing.UNMEASURABLE: "cannot be measured in this mode, or no longer part of the model",
    Missing.NO_PARAMETERS: "an activation, which has no parameters and so no gradient of its own",
}


@dataclass(frozen=True, slots=True)
class Site:
    """One thing that is measured."""

    name: str
    kind: Literal["total", "layer", "parameter", "activation", "tap"]
    module: str
    """Class name of the module, for a parameter of the module that owns it; "tap" for a tapped tensor."""
    layer: int
    """Site index of the owning layer (its own for a layer and a tapped tensor, 0 for the total); of an activation, of
    the layer before it in the model's order."""
    numel: int
    dtype: str
    shape: tuple[int, ...] = ()
    """Of a parameter."""


def clean_name(name: str) -> str:
    """The dotted name as the user wrote it: without the segments that wrappers and parametrizations add."""
    if "_" not in name and "parametrizations" not in name:
        return name
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if "parametrizations" in parts:
        parts.remove("parametrizations")
    return ".".join(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The sites of a run. Append-only: an index, once given, stays. Site 0 is the total."""

    sites: tuple[Site, ...]
    order: tuple[int, ...] = ()
    """Site indices of the layers in the order their forward first ran, each behind those that flow into it; empty while
    unknown."""
    modules: frozenset[str] = frozenset()
    """Class names of all modules of the model, those without parameters too (Sigmoid, BatchNorm2d, ...)."""
    edges: tuple[tuple[int, int], ...] | None = None
    """Between which layers data flows, as site indices: what the first gives out reaches the second past no other. The
    second is 0 where that is the loss. Without cycles, and None while unknown: then `order` counts for a chain."""
    index: Mapping[str, int] = field(init=False)
    layers: NDArray[np.intp] = field(init=False)
    """Site indices of the layers, in model order."""
    parameters: NDArray[np.intp] = field(init=False)
    """Site indices of the parameters, in model order."""
    owners: NDArray[np.intp] = field(init=False)
    """For each of `parameters`, the site index of its layer."""
    activations: NDArray[np.intp] = field(init=False)
    """Site indices of the activations, in model order: modules without parameters, whose outputs are measured."""
    taps: NDArray[np.intp] = field(init=False)
    """Site indices of the tapped tensors, in the order in which they were first tapped."""
    graded: slice | NDArray[np.intp] = field(init=False)
    """The sites whose gradient an optimizer uses, for indexing: all but `activations` and `taps`."""
    blank: Floats = field(init=False)
    """NaN for every site: what a record has for a statistic that was not measured. Not to be written."""
    starts: NDArray[np.intp] | None = field(init=False)
    """Where each layer's parameters begin among `parameters`, if the sites are in order: total, layers, parameters
    layer by layer, then all others. None where adopted ones have been appended."""

    def __post_init__(self) -> None:
        chosen: dict[str, list[int]] = {kind: [] for kind in ("total", "layer", "parameter", "activation", "tap")}
        for i, site in enumerate(self.sites):
            chosen[site.kind].append(i)
        blank = np.full(len(self.sites), np.nan)
        blank.flags.writeable = False
        object.__setattr__(self, "blank", blank)
        object.__setattr__(self, "index", {site.name: i for i, site in enumerate(self.sites)})
        object.__setattr__(self, "layers", np.array(chosen["layer"], dtype=np.intp))
        object.__setattr__(self, "parameters", np.array(chosen["parameter"], dtype=np.intp))
        owners = np.array([self.sites[i].layer for i in chosen["parameter"]], dtype=np.intp)
        object.__setattr__(self, "owners", owners)
        first = len(chosen["layer"]) + 1
        last = first + len(owners)
        in_place = [*chosen["layer"], *chosen["parameter"]] == list(range(1, last))
        ordered = in_place and bool(np.all(np.diff(owners) >= 0))
        object.__setattr__(self, "activations", np.array(chosen["activation"], dtype=np.intp))
        object.__setattr__(self, "taps", np.array(chosen["tap"], dtype=np.intp))
        rest = np.array(sorted(chosen["total"] + chosen["layer"] + chosen["parameter"]), dtype=np.intp)
        object.__setattr__(self, "graded", slice(len(rest)) if not len(rest) or rest[-1] < len(rest) else rest)
        starts = np.unique(owners, return_index=True)[1].astype(np.intp)
        object.__setattr__(self, "starts", starts if ordered and len(starts) == first - 1 > 0 else None)

    def __len__(self) -> int:
        return len(self.sites)

    def names(self, indices: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.sites[int(i)].name for i in indices)

    def with_taps(self, taps: Iterable[tuple[str, int, str]]) -> Layout:
        """The same with a site for each of `taps`, tensors by name, number of elements and dtype."""
        sites = list(self.sites)
        for name, numel, dtype in taps:
            sites.append(Site(name, "tap", "tap", len(sites), numel, dtype))
        return replace(self, sites=tuple(sites))

    def find(self, name: str) -> int:
        """Site index of `name`, with or without what wrappers add. Raises KeyError naming the nearest sites."""
        found = self.index.get(name or ROOT)
        if found is None and (found := self.index.get(clean_name(name) or ROOT)) is None:
            from difflib import get_close_matches

            near = get_close_matches(name, list(self.index), n=3, cutoff=0.4) or list(self.index)[:3]
            raise KeyError(f"no site named {name!r}; the nearest are {', '.join(map(repr, near))}")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The numbers of one optimizer step."""

    step: int
    """Optimizer steps taken before this one."""
    axis: int
    """Where this step stands on the x-axis of the Trainer's own logs."""
    optimizer: int
    layout: Layout
    values: Mapping[str, Floats]
    """Statistic -> one number per site, NaN where it was not measured. Not to be written."""
    scalars: Mapping[str, float]
    """Numbers of the whole step: `loss`, `lr`, `accumulated` (n) and `accumulate` (N), `batch`, ..."""
    codes: NDArray[np.int8]
    """One `Missing` per site, for the gradient."""
    fresh: frozenset[str] | None = None
    """The statistics of which any site has a number; None where that was not kept account of."""

    def has(self, statistic: str) -> bool:
        """Whether `statistic` was measured at this step: a gradient norm that is NaN was, too."""
        if self.fresh is not None and statistic in self.fresh:
            return True
        if statistic == "grad_norm":
            return statistic in self.values and bool((self.codes == int(Missing.MEASURED)).any())
        return self.fresh is None and statistic in self.values and any_known(self.values[statistic])

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Layers, parameters and tapped tensors whose measured gradient is not finite."""
        if "grad_norm" not in self.values:
            return ()
        bad = (self.codes == Missing.MEASURED) & ~np.isfinite(self.values["grad_norm"])
        return self.layout.names(np.flatnonzero(bad[1:]) + 1)

    @property
    def missing(self) -> dict[str, str]:
        """Why each layer, parameter and tapped tensor without a gradient norm has none; activations never have one."""
        absent = np.flatnonzero((self.codes != Missing.MEASURED) & (self.codes != Missing.NO_PARAMETERS))
        return {self.layout.sites[i].name: Missing(int(self.codes[i])).reason for i in absent}

    def value(self, statistic: str, site: str | None = None) -> float:
        """One number, by default the total's; NaN where it was not measured."""
        if statistic in self.values:
            return float(self.values[statistic][0 if site is None else self.layout.find(site)])
        return float(self.scalars.get(statistic, np.nan)) if site is None else float("nan")


class Loop(Protocol):
    """What a training loop can be asked at an incident."""

    folder: str | None
    """The logger's; None where there is none, and nobody expects files."""
    rank: int

    def batch(self, index: int, epoch: int, *, data: bool) -> Mapping[str, Any] | None:
        """The batch of that index and epoch as plain data, if it is under way or recent; None where it is not known.

        `index`, `epoch`, `rng` (the states of the random number generators at its start), `data` (the batch itself,
        None without `data=True`), and `notes`: place in the batch -> what was left out there or became something else.
        """

    def settings(self) -> Mapping[str, Any]:
        """How it trains and how far it is, as plain data."""

    def checkpoint(self, sick: Callable[[int], bool]) -> tuple[str, int] | None:
        """Path of the last checkpoint whose number of optimizer steps is not `sick`, and that number; None: none."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What a sink needs to know of the run it is opened for."""

    layout: Layout
    description: str
    """The start-up line: what is watched, how, and what each number is."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Statistic -> what its numbers are, e.g. "accumulated x4, unscaled, before clipping"."""
    log_dir: str | None = None
    log_every_n_steps: int = 1
    loggers: tuple[object, ...] = ()
    """The Trainer's loggers; empty on ranks other than 0 and without Lightning."""
    metrics: Callable[[], dict[str, object]] | None = None
    """Gives the dict in which EarlyStopping and ModelCheckpoint look (`trainer.callback_metrics`)."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What else is known of how it trains, for people: "precision" -> "bf16-mixed"."""
    loop: Loop | None = None
    """Answers questions at an incident; None where nobody does."""

    def of(self, layout: Layout, labels: Mapping[str, str]) -> Run:
        """The same run, of a model that is laid out so."""
        watched = f"{len(layout.layers)} layers, {len(layout.parameters)} parameters"
        description = f"GradWatch watches {watched}: {'; '.join(labels.values())}."
        return replace(self, layout=layout, description=description, labels=labels)
