"""Finds the layers of a model and the activations that follow them; chooses layers by shell patterns on names."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from gradwatch.core.arguments import SHOWN_CHARACTERS, check_pattern_list, shown
from gradwatch.core.guard import UserFacingError
from gradwatch.core.record import ROOT, TOTAL, Layout, Site, clean_name

ALL_LAYERS = ("*",)
"""The patterns of a model that is watched whole."""

# fmt: off
ACTIVATIONS = frozenset({
    "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid",
    "LogSoftmax", "Mish", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax", "Softmax2d", "Softmin",
    "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold",
})
# fmt: on
"""Class names in torch.nn of the activations without parameters; a class derived from one is of its kind."""


# torch's type stubs know neither its arguments nor that it is a parameter
REMOVED: nn.Parameter = cast(Any, UninitializedParameter)(requires_grad=False, device="cpu", dtype=torch.float32)
"""Takes the place of a parameter that the model no longer has. It is skipped like any parameter that is still lazy."""


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
    """Whether module hooks work on it: not inside a compiled region, not a ScriptModule, not what another module holds
    for it.
    """
    activations: tuple[Activation, ...] = ()
    """Those between this layer and the next in model order on which module hooks work; the first layer also has those
    before it."""


Structure = tuple[list[tuple[str, int, bool]], list[tuple[str, str, int, int]]]
"""Modules by path, identity and whether they are compiled; parameters by module, name, identity and number of
elements."""


class NoSuchLayer(UserFacingError, ValueError):  # noqa: N818 (the base says what it is)
    """A pattern that matches no layer. It can only be raised at fit start, when the model is known."""


def check_patterns(layers: object) -> tuple[str, ...]:
    """The `layers` argument as a tuple of patterns. Raises TypeError or ValueError."""
    if layers is None:
        return ALL_LAYERS
    expected = "None, a shell pattern such as 'encoder.*' or a list of them such as ['*', '!head']"
    instead = "a shell pattern such as 'encoder.*', or None for every layer"
    return check_pattern_list("layers", layers, expected, instead=instead)


def find_layers(model: nn.Module, patterns: Sequence[str] = ALL_LAYERS, *, require_match: bool = True) -> list[Layer]:
    """The layers of `model` that `patterns` choose, in model order; later patterns win, '!' excludes.

    Raises NoSuchLayer, a ValueError, for a pattern that matches no layer, unless `require_match` is False.
    """
    layers = list(_all_layers(model))
    if tuple(patterns) == ALL_LAYERS:
        return layers
    chosen = set(choose([layer.name for layer in layers], patterns, require_match=require_match))
    return [layer for layer in layers if layer.name in chosen]


def choose(
    names: Sequence[str], patterns: Sequence[str], *, argument: str = "layers", require_match: bool = True
) -> list[str]:
    """Those of `names` that `patterns` choose; later patterns win, '!' excludes.

    Raises NoSuchLayer, which names the `argument`, for a pattern that matches none, unless `require_match` is False.
    """
    chosen = {name: patterns[0].startswith("!") for name in names}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern.removeprefix("!"))]
        if not matched and names and require_match:
            raise NoSuchLayer(_no_match(pattern, names, argument))
        chosen.update(dict.fromkeys(matched, not pattern.startswith("!")))
    return [name for name in names if chosen[name]]


def structure_of(model: nn.Module) -> Structure:
    """The modules and parameters of `model`: while they live and this is equal, the model has the same layers."""
    modules, parameters = [], []
    for path, module in model.named_modules():
        modules.append((path, id(module), is_compiled(path, module)))
        # `named_parameters` takes twice as long (measured)
        for name, one in module._parameters.items():
            if one is not None:
                size = one.numel() if type(one) is nn.Parameter else _size(one)
                parameters.append((path, name, id(one), size))
    return modules, parameters


def _no_match(pattern: str, names: Sequence[str], argument: str) -> str:
    prefix = pattern.removeprefix("!")[:SHOWN_CHARACTERS]
    if any(name.startswith(prefix + ".") for name in names):
        hint = f"'{prefix}' owns no parameters itself; for the layers inside it write '{prefix}.*'"
    else:
        hint = nearest_names(pattern, names)
    return f"{argument}: the pattern {shown(pattern)} matches no layer; {hint}"


def nearest_names(pattern: str, names: Sequence[str]) -> str:
    """What an error says of a pattern, or a name, that is none of `names`."""
    bare = pattern.removeprefix("!").rstrip(".*")[:SHOWN_CHARACTERS]
    close = get_close_matches(bare, names, n=5, cutoff=0.3) or list(names[:5])
    return f"the nearest names are {', '.join(close)}"


def wrapper_prefix(model: nn.Module) -> str:
    return "module." if isinstance(model, DataParallel | DistributedDataParallel) else ""


def clean_path(path: str, prefix: str) -> str:
    """The clean name of the module at `path`, empty for the model itself. `prefix`: of `wrapper_prefix`."""
    return clean_name(f"{path}.".removeprefix(prefix)).rstrip(".")


def _all_layers(model: nn.Module) -> Iterator[Layer]:
    prefix = wrapper_prefix(model)
    owned: dict[str, tuple[nn.Module, list[tuple[str, nn.Parameter]], bool]] = {}
    activations: dict[str, list[Activation]] = {}
    seen: set[int] = set()
    compiled: list[str] = []
    kinds: dict[type, str | None] = {}

    for path, module in model.named_modules():
        if is_compiled(path, module):
            compiled.append(path)
        own = []
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                own.append((key, parameter))
        kind = None if own else _activation(module, kinds)
        if not own and not kind:
            continue
        # the original tensors of a parametrized weight belong to the module that has the weight
        owner, inside, _ = path.partition(".parametrizations.")
        whole = clean_path(path, prefix)
        name = (clean_path(owner, prefix) if inside else whole) or ROOT
        hookable = not isinstance(module, ScriptModule)
        if compiled and hookable:
            hookable = not any(is_within(path, region) for region in compiled)
        begin = f"{whole}." if whole else ""
        for key, parameter in own:
            # a module that holds the parameters of others, as TensorDictParams does, names them with dots
            held = key.rpartition(".")[0]
            layer = begin + held if held else name
            if layer not in owned:
                owned[layer] = model.get_submodule(owner) if inside else module, [], hookable and not held
            owned[layer][1].append((begin + key, parameter))
        if kind and hookable and not inside:
            activations.setdefault(next(reversed(owned), ""), []).append(Activation(name, module, kind))
    before = activations.get("", [])
    for name, (module, parameters, hookable) in owned.items():
        yield Layer(name, module, tuple(parameters), hookable, (*before, *activations.get(name, ())))
        before = []


def _activation(module: nn.Module, kinds: dict[type, str | None]) -> str | None:
    """Which of `ACTIVATIONS` it is, if it is one. `kinds`: what is known of classes; it must not outlive the search,
    because a class may hold a model.
    """
    made = type(module)
    if made not in kinds:
        kinds[made] = next((base.__name__ for base in made.__mro__ if base.__name__ in ACTIVATIONS), None)
    kind = kinds[made]
    bare = kind and next(module.children(), None) is None and next(module.parameters(), None) is None
    return kind if bare else None


def is_compiled(path: str, module: nn.Module) -> bool:
    """Whether `module` is compiled: by `torch.compile`, by `module.compile()`, or by Lightning, which replaces the
    methods of a compiled LightningModule.
    """
    if path.rpartition(".")[2] == "_orig_mod":
        return True
    own = vars(module)
    if own.get("_compiled_call_impl") is not None:
        return True
    forward = own.get("forward")
    return forward is not None and getattr(forward, "_torchdynamo_orig_callable", None) is not None


def is_within(path: str, region: str) -> bool:
    return not region or path == region or path.startswith(region + ".")


def libraries_of(model: nn.Module) -> dict[str, str]:
    """The modules of `model` whose class is of an installed package, and of which: name -> package.

    Modules of torch that such a class gives itself, or its containers hold, count as parts of it; those that somebody
    else has put there do not.
    """
    prefix, packages, found = wrapper_prefix(model), dict[type, str](), dict[str, str]()
    parents: dict[str, type] = {}
    for path, module in model.named_modules():
        kind, name = type(module), clean_path(path, prefix)
        parents[path] = kind
        if kind not in packages:
            packages[kind] = _installed_package(kind)
        if packages[kind] == "torch":
            parent, _, own = path.rpartition(".")
            around = found.get(clean_path(parent, prefix)) if path else None
            if around and (packages[parents[parent]] == "torch" or own in _names_in(parents[parent])):
                found[name] = around
        elif packages[kind]:
            found[name] = packages[kind]
    return found


@cache
def _names_in(kind: type) -> frozenset[str]:
    """The names of attributes that the methods of a class use."""
    methods = (value for base in kind.__mro__ for value in vars(base).values() if isinstance(value, FunctionType))
    return frozenset(name for method in methods for name in method.__code__.co_names)


def _installed_package(kind: type) -> str:
    """The top-level package of a class, if that was installed; empty for a class of the user's own files."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__.partition(".")[0] if {"site-packages", "dist-packages"} & {*Path(file).parts} else ""


def layout_of(
    layers: Sequence[Layer],
    *,
    before: Layout | None = None,
    modules: frozenset[str] = frozenset(),
    libraries: Mapping[str, str] | None = None,
    partial: bool = False,
) -> Layout:
    """The sites of `layers`: the total, the layers, their parameters, the activations that follow them. `partial`:
    whether the model has more layers than these.

    Sites of `before` keep their indices; a tapped tensor with the name of a new site gets a number behind its name.
    """
    before = before or Layout(())
    known = before.sites or (Site(TOTAL, "total", "", 0, 0, ""),)
    # a layer may be called "total", too, and a new site as a tap is
    sites: dict[object, Site] = {
        (site.kind, site.name) if site.kind in ("total", "tap") else site.name: site for site in known
    }
    places = {key: place for place, key in enumerate(sites)}
    sizes = [[_size(parameter) for _, parameter in layer.parameters] for layer in layers]
    for layer, own in zip(layers, sizes, strict=True):
        place = places.setdefault(layer.name, len(places))
        sites[layer.name] = Site(layer.name, "layer", type(layer.module).__name__, place, sum(own), "")
    for layer, own in zip(layers, sizes, strict=True):
        kind, place = type(layer.module).__name__, places[layer.name]
        for (name, parameter), size in zip(layer.parameters, own, strict=True):
            shape = tuple(parameter.shape) if size else ()
            sites[name] = Site(name, "parameter", kind, place, size, _dtype_name(parameter.dtype), shape)
    for layer in layers:
        for activation in layer.activations:
            name, kind = activation.name, type(activation.module).__name__
            if name not in sites or sites[name].kind == "activation":
                sites[name] = Site(name, "activation", kind, places[layer.name], 0, "")
    taken = {TOTAL, *sites}
    for key, site in sites.items():
        if site.kind == "tap":
            sites[key] = site._replace(name=unique_name(site.name, taken))
            taken.add(sites[key].name)
    every = tuple(sites.values())
    return Layout(every, before.order, modules, before.edges, partial=partial, libraries=libraries or {})


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unique_name(name: str, taken: Container[object]) -> str:
    """`name`, or `name` with the first number in brackets that makes it one that is not `taken`."""
    numbered = (name if n == 1 else f"{name} ({n})" for n in count(1))
    return next(free for free in numbered if free not in taken)


def is_lazy(parameter: nn.Parameter) -> bool:
    """Whether `parameter` gets its shape at the first forward pass, which has not run yet."""
    return issubclass(
        type(parameter), UninitializedParameter
    )  # isinstance runs Python for parameters, five times as slow


def _size(parameter: nn.Parameter) -> int:
    return 0 if type(parameter) is not nn.Parameter and is_lazy(parameter) else parameter.numel()


def has_doubles(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether any is in double precision, so that its norm may be beyond float32."""
    return not {parameter.dtype for parameter in parameters}.isdisjoint((torch.float64, torch.complex128))


def smallest_of_parts(parameters: Sequence[nn.Parameter], parts: int) -> list[nn.Parameter]:
    """`parameters` cut into `parts` of about the same number, or fewer: the one with the fewest elements of each."""
    cuts = np.array_split(np.arange(len(parameters)), min(parts, len(parameters))) if parameters else ()
    return [min((parameters[place] for place in cut), key=nn.Parameter.numel) for cut in cuts]


def main_device(parameters: Sequence[nn.Parameter]) -> torch.device:
    """The device that holds most of `parameters`; numbers of others are copied there."""
    devices = Counter(parameter.device for parameter in parameters if parameter is not REMOVED)
    del devices[torch.device("meta")]
    return devices.most_common(1)[0][0] if devices else torch.device("cpu")
