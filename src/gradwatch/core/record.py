"""The sites of a run, where numbers are measured, and the record of each optimizer step, with the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.arguments import wrong
from gradwatch.core.training_loop import TrainingLoop

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Codes = NDArray[np.int8]
"""`Missing` codes."""
Sites = NDArray[np.intp]
"""Site indices, shape [n]."""

TOTAL = "total"
"""Name of site 0, all watched parameters together. If a layer has this name too, the name means the layer."""

ROOT = "(root)"
"""Name of the layer of parameters that the model owns directly; `series` also accepts its dotted name, ''."""

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})


def module_of(layer: str) -> str:
    """The name of the module that is the `layer`: '' of the model itself."""
    return "" if layer == ROOT else layer


def name_within(layer: str, key: str) -> str:
    """The name of what the module that is the `layer` has under `key`: 'fc.weight', 'weight' of the model itself."""
    return key if layer == ROOT else f"{layer}.{key}"


def modules_around(layer: str) -> list[str]:
    """The names of the modules around the `layer`, from the inside: 'a.b', 'a' and '' of 'a.b.c'."""
    parts = [] if layer == ROOT else layer.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]


def as_float32(numbers: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """`numbers` rounded to float32. Finite numbers never become 0 or infinite, which rules report as faults: those
    beyond the range of float32 become its smallest or largest number.
    """
    with np.errstate(over="ignore", under="ignore"):
        rounded = numbers.astype(np.float32)
    if (np.isinf(rounded) | (rounded == 0)).any():
        limits = np.finfo(np.float32)
        overflown = np.isinf(rounded) & np.isfinite(numbers)
        lost = (rounded == 0) & (numbers != 0)
        rounded[overflown] = np.copysign(limits.max, numbers[overflown])
        rounded[lost] = np.copysign(limits.smallest_subnormal, numbers[lost])
    return rounded


class Missing(IntEnum):
    """Why a site has no gradient norm in a record; `MEASURED` where it has one."""

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
        """In words."""
        return _REASONS[self]


(
    MEASURED,
    NOT_SAMPLED,
    FROZEN,
    NO_GRADIENT,
    OTHER_OPTIMIZER,
    NO_OPTIMIZER,
    LAZY,
    UNMEASURABLE,
    NO_PARAMETERS,
) = map(int, Missing)
"""The codes as ints for arrays: numpy compares with them five times faster than with an IntEnum."""

_REASONS = {
    Missing.MEASURED: "measured",
    Missing.NOT_SAMPLED: "not sampled at this step",
    Missing.FROZEN: "frozen (requires_grad is False)",
    Missing.NO_GRADIENT: "no gradient at the step",
    Missing.OTHER_OPTIMIZER: "belongs to another optimizer",
    Missing.NO_OPTIMIZER: "in no optimizer",
    Missing.LAZY: "not materialised yet",
    Missing.UNMEASURABLE: "cannot be measured in this mode, or no longer part of the model",
    Missing.NO_PARAMETERS: "an activation, which has no parameters and so no gradient of its own",
}


class Site(NamedTuple):
    """A layer, parameter, activation or tapped tensor that is measured, or the total.

    A tuple, as a model may have 20,000 parameters: a frozen dataclass takes four times as long to make (measured).
    """

    name: str
    kind: Literal["total", "layer", "parameter", "activation", "tap"]
    module: str
    """Class name of the module, or of the module that owns the parameter; "tap" for a tapped tensor."""
    layer: int
    """Site index of the layer that owns it: its own for a layer and a tapped tensor, 0 for the total, and for an
    activation that of the layer before it in model order, or of the first layer."""
    numel: int
    """Number of elements."""
    dtype: str
    shape: tuple[int, ...] = ()
    """Shape of a parameter; empty for other sites."""


def clean_name(name: str) -> str:
    """The dotted name in the user's model, without the parts that wrappers and parametrizations add."""
    if "_" not in name and "parametrizations" not in name:
        return name
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if "parametrizations" in parts:
        parts.remove("parametrizations")
    return ".".join(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The sites of a run by index. Site 0 is the total. Sites are only appended, so indices stay valid."""

    sites: tuple[Site, ...]
    order: tuple[int, ...] = ()
    """Site indices of the layers in topological order of the data flow, or else in the order of their first forward;
    empty while unknown."""
    modules: frozenset[str] = frozenset()
    """Class names of all modules of the model, with or without parameters (Sigmoid, BatchNorm2d, ...)."""
    edges: tuple[tuple[int, int], ...] | None = None
    """Pairs of site indices of layers: the output of the first flows into the second through no other layer. The second
    is 0 for the loss. There are no cycles. None while unknown: then the layers count as a chain in `order`."""
    unowned: tuple[str, ...] = ()
    """Layers that the loss depends on and the model does not know, by where they were found; no sites."""
    loss_parameters: frozenset[str] = frozenset()
    """Parameters that the loss of the first sampled step depends on; empty while unknown."""
    partial: bool = False
    """Whether the model has layers that are not watched."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Modules whose class is of an installed package, with or without parameters: name -> package."""
    index: Mapping[str, int] = field(init=False)
    layers: NDArray[np.intp] = field(init=False)
    """Site indices of the layers, in model order."""
    parameters: NDArray[np.intp] = field(init=False)
    """Site indices of the parameters, in model order."""
    owners: NDArray[np.intp] = field(init=False)
    """For each of `parameters`, the site index of its layer."""
    activations: NDArray[np.intp] = field(init=False)
    """Site indices of the activations, modules without parameters whose outputs are measured, in model order."""
    taps: NDArray[np.intp] = field(init=False)
    """Site indices of the tapped tensors, in the order in which they were first tapped."""
    sizes: Floats = field(init=False)
    """Number of elements of each site: shape [sites]."""
    parameter_starts: NDArray[np.intp] | None = field(init=False)
    """Index of each layer's first parameter among `parameters`, if the sites are ordered: total, layers, parameters
    layer by layer, then all others. None where parameters were appended later."""

    def __post_init__(self) -> None:
        found: dict[str, list[int]] = {kind: [] for kind in ("total", "layer", "parameter", "activation", "tap")}
        for i, site in enumerate(self.sites):
            found[site.kind].append(i)
        of_kind = {kind: np.array(places, dtype=np.intp) for kind, places in found.items()}
        layers, parameters = of_kind["layer"], of_kind["parameter"]
        owners = np.array([self.sites[i].layer for i in found["parameter"]], dtype=np.intp)
        trained = np.concatenate([layers, parameters])
        in_order = bool(np.all(trained == np.arange(1, 1 + len(trained))))
        by_layer = in_order and bool(np.all(np.diff(owners) >= 0))
        starts = np.unique(owners, return_index=True)[1].astype(np.intp)
        derived = {
            "index": {site.name: i for i, site in enumerate(self.sites)},
            "layers": layers,
            "parameters": parameters,
            "owners": owners,
            "activations": of_kind["activation"],
            "taps": of_kind["tap"],
            "sizes": np.array([site.numel for site in self.sites], dtype=np.float64),
            "parameter_starts": starts if by_layer and len(starts) == len(layers) > 0 else None,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.sites)

    def names(self, indices: Iterable[int]) -> tuple[str, ...]:
        return tuple([self.sites[i].name for i in indices])

    def parameters_of(self, layer: int) -> Sites:
        """Site indices of the parameters that `layer` owns directly."""
        return np.asarray(self.parameters[self.owners == layer])

    def without_class(self, sites: Sites, *parts: str) -> Sites:
        """`sites` but for those whose class has one of `parts` in its name, such as "Norm"."""
        kept = [site for site in sites if not any(part in self.sites[site].module for part in parts)]
        return np.array(kept, dtype=np.intp)

    def with_taps(self, taps: Iterable[tuple[str, int, str]]) -> Layout:
        """Append a site for each of `taps`, tensors given as (name, number of elements, dtype)."""
        sites = list(self.sites)
        for name, numel, dtype in taps:
            sites.append(Site(name, "tap", "tap", len(sites), numel, dtype))
        return replace(self, sites=tuple(sites))

    def find(self, name: str) -> int:
        """Site index of `name`, with or without the parts that wrappers add. Raises KeyError, which names similar
        sites, and TypeError for what is no name.
        """
        if not isinstance(name, str):
            raise TypeError(wrong("name", name, "the name of a site such as 'encoder.0'"))
        found = self.index.get(name or ROOT)
        if found is None and (found := self.index.get(clean_name(name) or ROOT)) is None:
            from difflib import get_close_matches

            near = get_close_matches(name, list(self.index), n=3, cutoff=0.4) or list(self.index)[:3]
            raise KeyError(f"no site named {name!r}; the nearest are {', '.join(map(repr, near))}")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The numbers of one optimizer step. With several optimizers, each has records of its own."""

    step: int
    """Optimizer steps taken before this one, of all optimizers."""
    axis: int
    """The step's position on the x-axis of the Trainer's own logs; equal to `step` without a Trainer."""
    optimizer: int
    """Number of the optimizer that steps, from 0."""
    layout: Layout = field(repr=False)
    """The sites, in the order of the arrays below."""
    values: Mapping[str, Floats] = field(repr=False)
    """Statistic -> array of shape [sites], NaN where it was not measured. Statistics that were not measured at this
    step may be left out; `value` gives NaN for them. Read-only.
    """
    scalars: Mapping[str, float]
    """Numbers of the whole step: `loss`, `lr`, `batch`, `accumulated` (micro-batches added up) of `accumulate`, ..."""
    codes: NDArray[np.int8] = field(repr=False)
    """A `Missing` for each site, the reason why it has no gradient norm; shape [sites]."""
    fresh: frozenset[str] = field(repr=False)
    """The statistics measured at this step; a gradient norm that is NaN counts as measured."""

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Names of the layers, parameters and tapped tensors whose gradient norm is NaN or infinite."""
        bad = (self.codes == MEASURED) & ~np.isfinite(self.values["grad_norm"])
        return self.layout.names(np.flatnonzero(bad[1:]) + 1)

    @property
    def missing(self) -> dict[str, str]:
        """The reason for each layer, parameter and tapped tensor that has no gradient norm, by name."""
        absent = np.flatnonzero((self.codes != MEASURED) & (self.codes != NO_PARAMETERS))
        return {self.layout.sites[i].name: Missing(int(self.codes[i])).reason for i in absent}

    def value(self, statistic: str, site: str | None = None) -> float:
        """`statistic` at the site of that name, by default the total or the whole step's number.

        NaN where it was not measured. Raises KeyError for an unknown site.
        """
        if statistic in self.values:
            return float(self.values[statistic][0 if site is None else self.layout.find(site)])
        return float(self.scalars.get(statistic, np.nan)) if site is None else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The description of a run that sinks get when it begins."""

    layout: Layout = field(repr=False)
    description: str
    """One line for the log: the watched layers, and what each number means."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Statistic -> what its numbers mean, such as "accumulated x4, unscaled, before clipping"."""
    log_dir: str | None = None
    log_every_n_steps: int = 1
    loggers: tuple[object, ...] = ()
    """The Trainer's loggers; empty on ranks other than 0 and without Lightning."""
    metrics: Callable[[], dict[str, object]] | None = field(default=None, repr=False)
    """Returns the dict that EarlyStopping and ModelCheckpoint read, `trainer.callback_metrics`."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Settings of the training, as text: "precision" -> "bf16-mixed"."""
    loop: TrainingLoop | None = field(default=None, repr=False)
    """The training loop; None without Lightning."""
    summary: Any = field(default=None, repr=False)
    """The `RunSummary` that the sinks of a run have in common; None where each has its own."""

    def with_layout(self, layout: Layout, labels: Mapping[str, str]) -> Run:
        """The same run with another layout, other labels and a description of them."""
        layers, parameters = len(layout.layers), len(layout.parameters)
        watched = f"{layers} layer{'s' * (layers != 1)}, {parameters} parameter{'s' * (parameters != 1)}"
        description = f"GradWatch watches {watched}: {'; '.join(labels.values())}."
        return replace(self, layout=layout, description=description, labels=labels)
