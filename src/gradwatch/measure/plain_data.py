"""Anything as plain data: what `torch.load(weights_only=True)` reads, on the CPU, a copy, and within bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 24
"""Levels of containers within containers. Judgement: deeper is a structure that leads back into itself."""
ENTRIES = 200_000
"""Numbers, texts and containers. Judgement: a list of as many numbers pickles in 50 ms."""
ATOMS = (bool, int, float, complex, str, bytes)


class TooLarge(Exception):  # noqa: N818 (not an error: a bound)
    """The whole does not fit; the text says why."""


def with_tensors(tree: Any) -> Any:
    """`tree` with a tensor for each array: a file with numpy in it does not load with `weights_only`."""
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    return {key: with_tensors(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def plain(thing: object, *, room: int) -> tuple[Any, dict[str, str]]:
    """`thing` in tensors, numbers, text, lists, tuples and dicts; place in it -> what became of what is none of those.

    Objects become dicts of their attributes, arrays tensors, and what cannot be kept None: the second result says so of
    each, by its place ("['graph'].edges"). `room`: bytes for tensors, arrays and text. Waits for the device.
    Raises TooLarge.
    """
    copy = _Copy(room)
    return copy.of(thing, "", 0), copy.notes


class _Copy:
    def __init__(self, room: int) -> None:
        self.notes: dict[str, str] = {}
        self._room, self._left, self._entries = room, room, ENTRIES

    def of(self, thing: object, place: str, depth: int) -> Any:
        self._entries -= 1
        if self._entries < 0:
            raise TooLarge(f"it has more than {ENTRIES} entries")
        if depth > DEPTH:
            return self._out(place, f"nested deeper than {DEPTH} levels")
        try:
            return self._of(thing, place, depth)
        except TooLarge:
            raise
        except Exception as error:  # an object of the user's own making
            return self._out(place, f"{_called(thing)} cannot be read: {type(error).__name__}: {error}")

    def _of(self, thing: object, place: str, depth: int) -> Any:
        if isinstance(thing, bytes) and not thing:
            self.notes[place] = "empty bytes, kept as empty text"  # `weights_only` does not know them
            return ""
        if thing is None or type(thing) in ATOMS:
            self._take(len(thing) if isinstance(thing, str | bytes) else 0)
            return thing
        if isinstance(thing, Tensor):
            return self._tensor(thing, place)
        if isinstance(thing, np.ndarray) and thing.dtype.kind in "biufc":
            self.notes[place] = "a numpy array, kept as a tensor"
            self._take(thing.nbytes)
            return torch.from_numpy(thing.astype(thing.dtype.newbyteorder("="), copy=True))
        if isinstance(thing, np.ndarray | np.generic):
            self._take(thing.nbytes)
            return self.of(thing.tolist(), place, depth + 1)
        if isinstance(thing, int | float | str):  # an enum's member, a number or a text of a kind of its own
            kind = next(atom for atom in (int, float, str) if isinstance(thing, atom))
            return self.of(kind.__str__(thing) if kind is str else kind(thing), place, depth + 1)
        if type(thing) is list:
            return list(self._items(thing, place, depth))
        if type(thing) is tuple:
            return tuple(self._items(thing, place, depth))
        if isinstance(thing, list | tuple | Set) and not _named(thing):
            self.notes[place] = f"{_called(thing)}, kept as a list"
            return list(self._items(thing, place, depth))
        return self._dict(thing, place, depth)

    def _items(self, things: Iterable[object], place: str, depth: int) -> Iterable[Any]:
        return (self.of(item, f"{place}[{i}]", depth + 1) for i, item in enumerate(things))

    def _dict(self, thing: object, place: str, depth: int) -> Any:
        if type(thing) is not dict:
            self.notes[place] = f"{_called(thing)}, kept as a dict"
        if isinstance(thing, Mapping):
            pairs: Iterable[tuple[Any, object]] = thing.items()
            return {
                key if type(key) in (str, int) else str(key): self.of(value, f"{place}[{key!r}]", depth + 1)
                for key, value in pairs
            }
        if isinstance(thing, type | nn.Module) or callable(thing):
            return self._out(place, f"{_called(thing)} is no data")
        return {name: self.of(value, f"{place}.{name}", depth + 1) for name, value in _attributes(thing).items()}

    def _tensor(self, tensor: Tensor, place: str) -> Any:
        kind = type(tensor)
        strange = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        if strange or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            return self._out(place, f"{_called(tensor)} ({tensor.layout}, {tensor.dtype}, {tensor.device}) is not kept")
        if kind not in (Tensor, nn.Parameter):
            self.notes[place] = f"{_called(tensor)}, kept as a tensor"
            tensor = tensor.as_subclass(Tensor)
        tensor = tensor.detach()
        self._take(tensor.numel() * tensor.element_size())
        # a copy of its own: to save a view is to save all that it is a view of
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TooLarge(f"it is larger than {self._room / 2**20:.3g} MiB")

    def _out(self, place: str, why: str) -> None:
        self.notes[place] = f"left out: {why}"


def _called(thing: object) -> str:
    kind = type(thing)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _named(thing: object) -> bool:
    """Whether it is a tuple whose items have names."""
    return isinstance(thing, tuple) and bool(getattr(type(thing), "_fields", ()))


def _attributes(thing: object) -> dict[str, object]:
    """What an object consists of, under names. Raises TypeError where it does not say."""
    if _named(thing):
        return thing._asdict()  # type: ignore[attr-defined, no-any-return]
    if dataclasses.is_dataclass(thing):
        return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    return dict(islice(vars(thing).items(), ENTRIES))
