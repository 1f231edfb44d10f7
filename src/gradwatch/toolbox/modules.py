"""Finds the modules of a model that match shell patterns, with parameters of their own or without."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape

from torch import nn
from torch.jit import ScriptModule

from gradwatch.core.arguments import check_pattern_list, shown, wrong
from gradwatch.core.record import ROOT
from gradwatch.measure.layers import choose, clean_path, is_compiled, is_lazy, is_within, nearest_names, wrapper_prefix

SCRIPTED = "is a ScriptModule, on which hooks do nothing; give the module it was scripted from"


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module and its clean name, the first one in model order."""

    name: str
    module: nn.Module
    unhookable: str
    """Why module hooks do not work on it; empty where they do."""


def find_modules(model: nn.Module, patterns: object, *, by: str) -> dict[str, NamedModule]:
    """Clean name -> module, in model order, for the modules that `patterns` choose: one shell pattern or several. Later
    patterns override earlier ones, and one that begins with "!" excludes. The model itself is "(root)". A module with
    two names is found under both.

    `by` names the caller's argument in errors: "capture: patterns". Raises TypeError and ValueError; the error for a
    pattern that matches nothing names similar modules.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(wrong(f"{by.partition(':')[0]}: model", model, "a torch.nn.Module"))
    one = "a shell pattern such as 'layer3.*'"
    several = check_pattern_list(by, patterns, f"{one}, or a list of them", instead=f"{one}, or '*' for every module")
    found = _named_modules(model)
    for pattern in several:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in found):
            raise ValueError(f"{by}: the pattern {shown(pattern)} matches no module; {_hint(pattern, list(found))}")
    return {name: found[name] for name in choose(list(found), several, require_match=False)}


def check_hookable(modules: Iterable[NamedModule], what: Collection[str], *, by: str) -> None:
    """Raises ValueError for a module on which module hooks do nothing, unless only "grad" is wanted of it; with "grad"
    also for one with a parameter whose gradient cannot be hooked, as it has no shape yet.
    """
    for named in modules:
        if named.unhookable and set(what) != {"grad"}:
            raise ValueError(f"{by}: module {named.name!r} {named.unhookable}")
        for name, parameter in named.module.named_parameters() if "grad" in what else ():
            if is_lazy(parameter):
                raise ValueError(
                    f"{by}: grad: {name} of module {named.name!r} has no shape yet; run the model once before"
                )


def each_once(found: Mapping[str, NamedModule]) -> list[NamedModule]:
    """The modules, of which one with two names is found under both."""
    return list({id(named.module): named for named in found.values()}.values())


def parameters_in(found: Mapping[str, NamedModule]) -> Iterator[tuple[str, str, nn.Parameter]]:
    """The parameters of the modules, each once: the module's name, the parameter's name in it, and the parameter."""
    seen = set[int]()
    for named in each_once(found):
        for name, parameter in named.module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield named.name, name, parameter


def _hint(pattern: str, names: Sequence[str]) -> str:
    if (bare := pattern.removeprefix("!")) in names:
        return f"brackets in a name are written in brackets, as by glob.escape: {shown(escape(bare))}"
    return nearest_names(pattern, names)


def _named_modules(model: nn.Module) -> dict[str, NamedModule]:
    prefix = wrapper_prefix(model)
    found: dict[str, NamedModule] = {}
    by_id: dict[int, NamedModule] = {}
    compiled: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if is_compiled(path, module):
            compiled.append(path)
        if "parametrizations" in path.split("."):
            continue  # torch's own modules behind a weight
        name = clean_path(path, prefix) or ROOT
        why = ""
        if isinstance(module, ScriptModule):
            why = SCRIPTED
        elif any(is_within(path, region) for region in compiled):
            why = (
                "is compiled, and hooks put on compiled code are never called; give and run the model that was not "
                "compiled (of torch.compile(model): model, or compiled._orig_mod)"
            )
        # a wrapper and the module in it have the same clean name; the inner module, which comes later, is the user's
        found[name] = by_id.setdefault(id(module), NamedModule(name, module, why))
    return found
