"""Finds and replaces the tensors inside nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from gradwatch.hooks.hook_set import MAX_DEPTH, tensors_in


def map_tensors(
    value: Any,
    change: Callable[[Tensor], Tensor],
    levels: int = MAX_DEPTH,
    *,
    copies: dict[int, tuple[Any, Any]] | None = None,
) -> Any:
    """`value` with `change(tensor)` for each tensor that `hooks.tensors_in` finds, in its order.

    A container without a changed tensor is returned itself, not a copy, and one that is there twice is copied once.
    Containers keep their type: named tuples, ordered dicts, other mutable mappings, frozen dataclasses; a mapping that
    cannot be written to becomes a dict.

    `copies`: gets the containers that are copied, by id, with their copies.
    """
    if isinstance(value, Tensor):
        return change(value)
    if not levels:
        return value
    copies = {} if copies is None else copies
    if id(value) not in copies:
        copied = _map_items(value, lambda item: map_tensors(item, change, levels - 1, copies=copies))
        if copied is value:
            return value
        copies[id(value)] = value, copied
    return copies[id(value)][1]


def _map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change(item)` for each of its items, if it is a container."""
    if isinstance(value, Mapping):
        return _mapping_like(value, {key: change(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        items = [*map(change, value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _sequence_like(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if getattr(value, field.name, None) is not None]
        old = {name: getattr(value, name) for name in names}
        new = {name: change(item) for name, item in old.items()}
        if all(new[name] is old[name] for name in names):
            return value
        copied = copy.copy(value)
        for name in names:
            object.__setattr__(copied, name, new[name])  # frozen ones too
        return copied
    return value


def _sequence_like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> list[Any] | tuple[Any, ...]:
    """A sequence with `items`, and the class and attributes of `value`. The class is not called: its constructor may
    take other arguments.
    """
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = items
        return copied
    kind = type(value)
    if hasattr(kind, "n_sequence_fields"):  # a struct sequence, as `torch.max` returns
        return kind(items)
    made = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def _mapping_like(value: Mapping[Any, Any], new: dict[Any, Any]) -> Mapping[Any, Any]:
    if all(new[key] is item for key, item in value.items()):
        return value
    if not isinstance(value, MutableMapping):
        return new
    copied = copy.copy(value)
    if getattr(value, "__dict__", None) is value:  # its items are its attributes, which copy.copy separates
        copied.__dict__ = copied  # type: ignore[assignment]
    for key, item in new.items():
        if item is not value[key]:
            copied[key] = item
    return copied


def distinct(value: object) -> list[Tensor]:
    """The tensors in nested containers, each once."""
    return list({id(tensor): tensor for tensor in tensors_in(value)}.values())


def replaced(
    value: Any, old: Sequence[Tensor], new: Sequence[Tensor], copies: dict[int, tuple[Any, Any]] | None = None
) -> Any:
    """`value` with each tensor of `old` replaced by the one at the same index in `new`; None where none changes.
    `copies`: as of `map_tensors`.
    """
    replacements = {id(a): b for a, b in zip(old, new, strict=True) if a is not b}
    if not replacements:
        return None
    return map_tensors(value, lambda tensor: replacements.get(id(tensor), tensor), copies=copies)


def write_back(copies: Iterable[tuple[Any, Any]], originals: Mapping[int, Any]) -> None:
    """Change each container of `copies` as its copy has been changed. `originals`: id of a tensor or copy -> what is
    written in its place.
    """
    for value, copied in copies:
        if isinstance(value, list):
            items = [originals.get(id(item), item) for item in copied]
            if len(items) != len(value) or any(new is not old for new, old in zip(items, value, strict=True)):
                value[:] = items
        elif isinstance(value, MutableMapping):
            for key in [key for key in value if key not in copied]:
                del value[key]
            for key, item in copied.items():
                new = originals.get(id(item), item)
                if key not in value or value[key] is not new:
                    value[key] = new
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                item = getattr(copied, field.name, None)
                new = originals.get(id(item), item)
                if getattr(value, field.name, None) is not new:
                    object.__setattr__(value, field.name, new)  # frozen ones too
