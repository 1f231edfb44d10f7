"""Arrays of a checkpoint in one tensor: torch saves each tensor in a file of its own, in 35 us however small it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ARRAY = "array \0"
"""The key by which an array's place is known: no name of a statistic has it."""


def join_arrays(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of dicts with arrays and what JSON knows: `arrays`, the bytes of all arrays one after the other, and
    `text`, JSON of the rest, with type, shape and first byte in place of each array. Both are copies.
    """
    parts: list[NDArray[np.uint8]] = []
    begin = 0

    def described(array: Any) -> dict[str, Any]:
        nonlocal begin
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{type(array).__name__} is no array")
        first, begin = begin, begin + array.nbytes
        parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return {ARRAY: array.dtype.str, "shape": array.shape, "first": first}

    text = json.dumps(tree, default=described, separators=(",", ":"))
    together = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)
    return {"text": text, "arrays": torch.from_numpy(together)}


def split_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of which `join_arrays` made `state`. Raises an exception of any class for anything else."""
    # runs once, before training: a checkpoint may have been loaded onto the device
    together = np.asarray(state["arrays"].detach().to("cpu")).tobytes()

    def array(leaf: dict[str, Any]) -> Any:
        if ARRAY not in leaf:
            return leaf
        dtype, shape, first = np.dtype(leaf[ARRAY]), leaf["shape"], leaf["first"]
        own = together[first : first + dtype.itemsize * prod(shape)]
        return np.frombuffer(own, dtype).reshape(shape).copy()  # refuses pointers to objects

    found: dict[str, Any] = json.loads(state["text"], object_hook=array)
    return found
