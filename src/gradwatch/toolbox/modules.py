"""Which modules of a model a shell pattern means: any module, with parameters of its own or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gradwatch.core.record import ROOT, clean_name
from gradwatch.measure.layers import is_compiled, within


@dataclass(frozen=True, slots=True)
class Named:
    """A module and its clean name, that of the place where it is first met."""

    name: str
    module: nn.Module
    unhookable: str
    """Why module hooks do not work on it; empty where they do."""


def find_modules(model: nn.Module, patterns: object, *, by: str) -> dict[str, Named]:
    """Clean name -> module, in model order, for those that `patterns` choose: a shell pattern or several, of which the
    later win and '!' takes away. The model itself is "(root)". A module used at two places has both names.

    `by` says whose argument `patterns` is: "capture: patterns". Raises TypeError and ValueError; for a pattern that
    matches nothing with the nearest names.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{by.partition(':')[0]}: model={model!r}: expected a torch.nn.Module")
    several = (patterns,) if isinstance(patterns, str) else patterns
    if not isinstance(several, Sequence) or not all(isinstance(pattern, str) for pattern in several):
        raise TypeError(f"{by}={patterns!r}: expected a shell pattern such as 'layer3.*', or a list of them")
    if not several or not all(pattern.lstrip("!") for pattern in several):
        raise ValueError(f"{by}={patterns!r}: empty; give a shell pattern such as 'layer3.*', or '*' for every module")
    found = _named(model)
    chosen = dict.fromkeys(found, several[0].startswith("!"))
    for pattern in several:
        matched = [name for name in found if fnmatchcase(name, pattern.removeprefix("!"))]
        if not matched:
            raise ValueError(f"{by}: the pattern {pattern!r} matches no module; {nearest(pattern, list(found))}")
        chosen.update(dict.fromkeys(matched, not pattern.startswith("!")))
    return {name: named for name, named in found.items() if chosen[name]}


def refuse_unhookable(named: Named, *, by: str) -> None:
    """Raises ValueError for a module on which module hooks do nothing."""
    if named.unhookable:
        raise ValueError(f"{by}: module {named.name!r} {named.unhookable}")


def nearest(pattern: str, names: Sequence[str]) -> str:
    bare = pattern.removeprefix("!").rstrip(".*")
    close = get_close_matches(bare, names, n=5, cutoff=0.3) or list(names[:5])
    return f"the nearest names are {', '.join(close)}"


def _named(model: nn.Module) -> dict[str, Named]:
    outer = "module." if isinstance(model, DataParallel | DistributedDataParallel) else ""
    found: dict[str, Named] = {}
    first: dict[int, Named] = {}
    compiled: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if is_compiled(path, module):
            compiled.append(path)
        if "parametrizations" in path.split("."):
            continue  # torch's own modules behind a weight
        name = clean_name(f"{path}.".removeprefix(outer).rstrip(".")) or ROOT
        why = ""
        if isinstance(module, ScriptModule):
            why = "is a ScriptModule, on which hooks do nothing; give the module it was scripted from"
        elif any(within(path, region) for region in compiled):
            why = (
                "is compiled, and hooks put on compiled code are never called; give and run the model that was not "
                "compiled (of torch.compile(model): model, or compiled._orig_mod)"
            )
        # of a wrapper and what it wraps, which have one name, the inner is the user's
        found[name] = first.setdefault(id(module), Named(name, module, why))
    return found
