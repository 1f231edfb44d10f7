"""Tensors inside tuples, lists, mappings and dataclasses, nested at will: changed one by one, the rest as it was."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from gradwatch.hooks.hook_set import LEVELS, tensors_in


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], levels: int = LEVELS) -> Any:
    """`value` with `change(tensor)` for each tensor that `hooks.tensors_in` finds, in its order.

    What holds no changed tensor is given back itself, not a copy. Containers keep their type: named tuples, ordered
    dicts, other mutable mappings, frozen dataclasses; a mapping that cannot be written to becomes a dict.
    """
    if isinstance(value, Tensor):
        return change(value)
    if not levels:
        return value
    if isinstance(value, Mapping):
        return _refilled(value, {key: map_tensors(item, change, levels - 1) for key, item in value.items()})
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change, levels - 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _listed(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if getattr(value, field.name, None) is not None]
        old = {name: getattr(value, name) for name in names}
        new = {name: map_tensors(item, change, levels - 1) for name, item in old.items()}
        if all(new[name] is old[name] for name in names):
            return value
        twin = copy.copy(value)
        for name in names:
            object.__setattr__(twin, name, new[name])  # frozen ones too
        return twin
    return value


def _listed(value: list[Any] | tuple[Any, ...], items: list[Any]) -> list[Any] | tuple[Any, ...]:
    """`items` in the place of those of `value`: of its class, whose arguments may be others, with its attributes."""
    if isinstance(value, list):
        twin = copy.copy(value)
        twin[:] = items
        return twin
    kind = type(value)
    if hasattr(kind, "n_sequence_fields"):  # such as `torch.max` gives
        return kind(items)
    made = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def _refilled(value: Mapping[Any, Any], new: dict[Any, Any]) -> Mapping[Any, Any]:
    if all(new[key] is item for key, item in value.items()):
        return value
    if not isinstance(value, MutableMapping):
        return new
    twin = copy.copy(value)
    for key, item in new.items():
        if item is not value[key]:
            twin[key] = item
    return twin


def distinct(value: object) -> list[Tensor]:
    """The tensors in a nest, each once."""
    return list({id(tensor): tensor for tensor in tensors_in(value)}.values())


def replaced(value: Any, old: Sequence[Tensor], new: Sequence[Tensor]) -> Any:
    """`value` with each tensor of `old` replaced by its mate in `new`; None where none changes."""
    mates = {id(a): b for a, b in zip(old, new, strict=True) if a is not b}
    return map_tensors(value, lambda tensor: mates.get(id(tensor), tensor)) if mates else None
