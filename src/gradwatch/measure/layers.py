"""Which modules are layers, and which activations follow them: clean names, shell patterns, parameters."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import count
from typing import Any, cast

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from gradwatch.core.guard import UserFacingError
from gradwatch.core.record import ROOT, TOTAL, Layout, Site, clean_name

# fmt: off
ACTIVATIONS = frozenset({
    "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid",
    "LogSoftmax", "Mish", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax", "Softmax2d", "Softmin",
    "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold",
})
# fmt: on
"""Class names in torch.nn of the activations without parameters; a class derived from one is of its kind."""


# torch's types know neither its arguments nor that it counts for a parameter
REMOVED: nn.Parameter = cast(Any, UninitializedParameter)(requires_grad=False, device="cpu", dtype=torch.float32)
"""Stands where a parameter was that the model no longer has. Like any that is not materialised, it is left alone."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A module without parameters or children that is one of `ACTIVATIONS`."""

    name: str
    module: nn.Module
    kind: str
    """Which of `ACTIVATIONS`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that owns parameters directly."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Full clean name and parameter; a tied parameter belongs to the first layer that owns it."""
    hookable: bool
    """Whether module hooks work on it: not inside a compiled region, not a ScriptModule."""
    activations: tuple[Activation, ...] = ()
    """Those between this layer and the next in the model's order on which module hooks work; before the first layer,
    they are the first's."""


Structure = tuple[list[tuple[str, int, bool]], list[tuple[str, str, int, int]]]
"""Modules by path, identity and whether they are compiled; parameters by module, name, identity and number of
elements."""


class NoSuchLayer(UserFacingError, ValueError):  # noqa: N818 (the base says what it is)
    """A pattern that matches no layer: known when the model is, and told to the user even though the fit has begun."""


def check_patterns(layers: object) -> tuple[str, ...]:
    """The `layers` argument as a tuple of patterns; raises TypeError or ValueError naming what would do."""
    if layers is None:
        return ("*",)
    patterns = (layers,) if isinstance(layers, str) else layers
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"layers={layers!r}: expected None, a shell pattern such as 'encoder.*' or a list of them "
            "such as ['*', '!head']"
        )
    if not patterns or not all(p.lstrip("!") for p in patterns):
        raise ValueError(f"layers={layers!r}: empty; give a shell pattern such as 'encoder.*', or None for every layer")
    return tuple(patterns)


def find_layers(model: nn.Module, patterns: Sequence[str] = ("*",), *, must: bool = True) -> list[Layer]:
    """The layers of `model` in model order that `patterns` choose; later patterns win, '!' takes away.

    Raises NoSuchLayer, a ValueError, for a pattern that matches no layer (unless not `must`), with the nearest names.
    """
    layers = list(_all_layers(model))
    chosen = set(choose([layer.name for layer in layers], patterns, must=must))
    return [layer for layer in layers if layer.name in chosen]


def choose(names: Sequence[str], patterns: Sequence[str], *, argument: str = "layers", must: bool = True) -> list[str]:
    """Those of `names` that `patterns` choose; later patterns win, '!' takes away.

    Raises NoSuchLayer for a pattern that matches none (unless not `must`), with the nearest; it names the `argument`.
    """
    chosen = {name: patterns[0].startswith("!") for name in names}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern.removeprefix("!"))]
        if not matched and names and must:
            raise NoSuchLayer(_no_match(pattern, names, argument))
        chosen.update(dict.fromkeys(matched, not pattern.startswith("!")))
    return [name for name in names if chosen[name]]


def structure_of(model: nn.Module) -> Structure:
    """What `model` is made of: while this is equal, and its modules and parameters live, it has the same layers."""
    modules, parameters = [], []
    for path, module in model.named_modules():
        modules.append((path, id(module), is_compiled(path, module)))
        # what `named_parameters` goes through, in half of its time (measured)
        own = module._parameters.items()
        parameters += [(path, name, id(one), _size(one)) for name, one in own if one is not None]
    return modules, parameters


def _no_match(pattern: str, names: Sequence[str], argument: str) -> str:
    bare = pattern.removeprefix("!")
    if any(name.startswith(bare + ".") for name in names):
        near = f"'{bare}' owns no parameters itself; for the layers inside it write '{bare}.*'"
    else:
        close = get_close_matches(bare.rstrip(".*"), names, n=5, cutoff=0.3) or list(names[:5])
        near = f"the nearest names are {', '.join(close)}"
    return f"{argument}: the pattern {pattern!r} matches no layer; {near}"


def _all_layers(model: nn.Module) -> Iterator[Layer]:
    outer = "module." if isinstance(model, DataParallel | DistributedDataParallel) else ""
    owned: dict[str, tuple[nn.Module, list[tuple[str, nn.Parameter]], bool]] = {}
    activations: dict[str, list[Activation]] = {}
    seen: set[int] = set()
    compiled: list[str] = []
    for path, module in model.named_modules():
        if is_compiled(path, module):
            compiled.append(path)
        own, kind = list(module.named_parameters(recurse=False)), _activation(module)
        if not own and not kind:
            continue
        # the originals behind a parametrized weight belong to the module that has the weight
        owner, inside, _ = path.partition(".parametrizations.")
        name = clean_name(f"{owner}.".removeprefix(outer).rstrip(".")) or ROOT
        hookable = not isinstance(module, ScriptModule) and not any(within(path, region) for region in compiled)
        for key, parameter in own:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            home = model.get_submodule(owner) if inside else module
            full = clean_name(f"{path}.{key}".removeprefix(".").removeprefix(outer))
            owned.setdefault(name, (home, [], hookable))[1].append((full, parameter))
        if kind and hookable and not inside:
            activations.setdefault(next(reversed(owned), ""), []).append(Activation(name, module, kind))
    before = activations.get("", [])
    for name, (module, parameters, hookable) in owned.items():
        yield Layer(name, module, tuple(parameters), hookable, (*before, *activations.get(name, ())))
        before = []


def _activation(module: nn.Module) -> str | None:
    """Which of `ACTIVATIONS` it is, if it is one."""
    kind = _kind(type(module).__mro__)
    bare = kind and next(module.children(), None) is None and next(module.parameters(), None) is None
    return kind if bare else None


@lru_cache(maxsize=1024)
def _kind(bases: tuple[type, ...]) -> str | None:
    return next((base.__name__ for base in bases if base.__name__ in ACTIVATIONS), None)


def is_compiled(path: str, module: nn.Module) -> bool:
    """By `torch.compile`, by `module.compile()`, or as Lightning does with a compiled LightningModule, whose methods
    it replaces.
    """
    if path.endswith("_orig_mod") and path.rpartition(".")[2] == "_orig_mod":
        return True
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "_torchdynamo_orig_callable", None) is not None


def within(path: str, region: str) -> bool:
    return not region or path == region or path.startswith(region + ".")


def layout_of(
    layers: Sequence[Layer], *, before: Layout | None = None, modules: frozenset[str] = frozenset()
) -> Layout:
    """The sites of `layers`: the total, the layers, their parameters, the activations that follow them.

    Sites of `before` keep their indices; a tapped tensor whose name a new site takes is numbered.
    """
    sites = list(before.sites) if before and len(before) else [Site(TOTAL, "total", "", 0, 0, "")]
    # a layer may be called "total" too: the total's own place is always 0
    index = {site.name: i for i, site in enumerate(sites) if i and site.kind != "tap"}

    def put(site: Site) -> None:
        if site.name in index:
            sites[index[site.name]] = site
        else:
            index[site.name] = len(sites)
            sites.append(site)

    for layer in layers:
        place = index.get(layer.name, len(sites))
        put(
            Site(
                layer.name, "layer", type(layer.module).__name__, place, sum(_size(p) for _, p in layer.parameters), ""
            )
        )
    for layer in layers:
        for name, parameter in layer.parameters:
            dtype = str(parameter.dtype).removeprefix("torch.")
            kind = type(layer.module).__name__
            size = _size(parameter)
            shape = tuple(map(int, parameter.shape)) if size else ()
            put(Site(name, "parameter", kind, index[layer.name], size, dtype, shape))
    for layer in layers:
        for activation in layer.activations:
            if activation.name not in index or sites[index[activation.name]].kind == "activation":
                put(Site(activation.name, "activation", type(activation.module).__name__, index[layer.name], 0, ""))
    taken = {TOTAL, *index}
    for place, site in enumerate(sites):
        if site.kind == "tap":
            sites[place] = replace(site, name=unique_name(site.name, taken))
            taken.add(sites[place].name)
    order, edges = (before.order, before.edges) if before else ((), None)
    return Layout(tuple(sites), order, modules or (before.modules if before else frozenset()), edges)


def unique_name(name: str, taken: Container[str]) -> str:
    """`name`, or with the first number in brackets under which it is not `taken`."""
    numbered = (name if n == 1 else f"{name} ({n})" for n in count(1))
    return next(free for free in numbered if free not in taken)


def is_lazy(parameter: nn.Parameter) -> bool:
    """Whether `parameter` still waits for its first forward to get a shape."""
    return issubclass(
        type(parameter), UninitializedParameter
    )  # isinstance runs Python for parameters, five times as slow


def _size(parameter: nn.Parameter) -> int:
    return 0 if is_lazy(parameter) else parameter.numel()


def has_doubles(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether any is in double precision, and its norm may be beyond float32."""
    return any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters)


def main_device(parameters: Sequence[nn.Parameter]) -> torch.device:
    """The device that holds most parameters; numbers from others are copied there."""
    devices = [parameter.device for parameter in parameters if not parameter.is_meta and parameter is not REMOVED]
    return max(set(devices), key=devices.count) if devices else torch.device("cpu")
