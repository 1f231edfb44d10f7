"""Copies any object as plain data, which `torch.load(weights_only=True)` reads: on the CPU, and of limited size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.guard import error_text

MAX_DEPTH = 24
"""Levels of nested containers. Judgement: deeper structures contain themselves."""
MAX_ENTRIES = 200_000
"""Numbers, strings and containers in all. Judgement: a list of as many numbers pickles in 50 ms."""
PLAIN_TYPES = (bool, int, float, complex, str, bytes)


class TooLarge(Exception):  # noqa: N818 (not an error: a limit)
    """The data is too large; the message says which limit it exceeds."""


def to_plain_data(value: object, *, max_bytes: int) -> tuple[Any, dict[str, str]]:
    """`value` as tensors, numbers, strings, lists, tuples and dicts, and notes on what was converted or left out.

    Objects become dicts of their attributes, arrays become tensors, and everything that cannot be kept becomes None.
    The notes name each by its path ("['graph'].edges"). `max_bytes`: of tensors, arrays and strings. Waits for the
    device. Raises TooLarge.
    """
    copy = _PlainCopy(max_bytes)
    return copy.copy_of(value, "", 0), copy.notes


class _PlainCopy:
    def __init__(self, max_bytes: int) -> None:
        self.notes: dict[str, str] = {}
        self._max_bytes, self._bytes_left, self._entries_left = max_bytes, max_bytes, MAX_ENTRIES

    def copy_of(self, value: object, path: str, depth: int) -> Any:
        self._entries_left -= 1
        if self._entries_left < 0:
            raise TooLarge(f"it has more than {MAX_ENTRIES} entries")
        if depth > MAX_DEPTH:
            return self._leave_out(path, f"nested deeper than {MAX_DEPTH} levels")
        try:
            return self._copy_of(value, path, depth)
        except TooLarge:
            raise
        except Exception as error:  # an object of the user's own making
            return self._leave_out(path, f"{_type_text(value)} cannot be read: {error_text(error)}")

    def _copy_of(self, value: object, path: str, depth: int) -> Any:
        if isinstance(value, bytes) and not value:
            self.notes[path] = "empty bytes, kept as empty text"  # `weights_only` cannot load them
            return ""
        if value is None or type(value) in PLAIN_TYPES:
            self._take(len(value) if isinstance(value, str | bytes) else 0)
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            self.notes[path] = "a numpy array, kept as a tensor"
            self._take(value.nbytes)
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=True))
        if isinstance(value, np.ndarray | np.generic):
            self._take(value.nbytes)
            return self.copy_of(value.tolist(), path, depth + 1)
        if isinstance(value, int | float | str):  # a member of an enum, or a subclass of a number or string
            kind = next(atom for atom in (int, float, str) if isinstance(value, atom))
            return self.copy_of(kind.__str__(value) if kind is str else kind(value), path, depth + 1)
        if type(value) is list:
            return list(self._items(value, path, depth))
        if type(value) is tuple:
            return tuple(self._items(value, path, depth))
        if isinstance(value, list | tuple | Set) and not _is_named_tuple(value):
            self.notes[path] = f"{_type_text(value)}, kept as a list"
            return list(self._items(value, path, depth))
        return self._dict(value, path, depth)

    def _items(self, values: Iterable[object], path: str, depth: int) -> Iterable[Any]:
        return (self.copy_of(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(values))

    def _dict(self, value: object, path: str, depth: int) -> Any:
        if type(value) is not dict:
            self.notes[path] = f"{_type_text(value)}, kept as a dict"
        if isinstance(value, Mapping):
            pairs: Iterable[tuple[Any, object]] = value.items()
            return {
                key if type(key) in (str, int) else str(key): self.copy_of(value, f"{path}[{key!r}]", depth + 1)
                for key, value in pairs
            }
        if isinstance(value, type | nn.Module) or callable(value):
            return self._leave_out(path, f"{_type_text(value)} is no data")
        return {name: self.copy_of(value, f"{path}.{name}", depth + 1) for name, value in _attributes(value).items()}

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        kind = type(tensor)
        custom_dispatch = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        if custom_dispatch or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            return self._leave_out(
                path, f"{_type_text(tensor)} ({tensor.layout}, {tensor.dtype}, {tensor.device}) is not kept"
            )
        if kind not in (Tensor, nn.Parameter):
            self.notes[path] = f"{_type_text(tensor)}, kept as a tensor"
            tensor = tensor.as_subclass(Tensor)
        tensor = tensor.detach()
        self._take(tensor.numel() * tensor.element_size())
        # a copy, because saving a view saves its whole base
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)

    def _take(self, size: int) -> None:
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise TooLarge(f"it is larger than {self._max_bytes / 2**20:.3g} MiB")

    def _leave_out(self, path: str, why: str) -> None:
        self.notes[path] = f"left out: {why}"


def _type_text(value: object) -> str:
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _is_named_tuple(value: object) -> bool:
    """Whether `value` is a namedtuple."""
    return isinstance(value, tuple) and bool(getattr(type(value), "_fields", ()))


def _attributes(value: object) -> dict[str, object]:
    """The attributes of an object by name. Raises TypeError where it has no `__dict__`."""
    if _is_named_tuple(value):
        return value._asdict()  # type: ignore[attr-defined, no-any-return]
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(islice(vars(value).items(), MAX_ENTRIES))
