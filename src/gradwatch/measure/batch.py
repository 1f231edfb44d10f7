"""The current batch, by reference: what a replay needs, beside the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.measure.random_states import RngState
from gradwatch.measure.reductions import version_of

MAX_DEPTH, MAX_ITEMS = 4, 64
"""Levels of containers, and items of each container, that are searched for the tensors of a batch. Judgement."""

PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
"""Types of what has no tensors: lists of these, such as unpadded tokens, are not searched item by item."""

_VERSION = attrgetter("_version")


@dataclass(slots=True, eq=False)
class Batch:
    """The batch of a training step. Its data is not copied: release it when the step is over."""

    index: int
    """Number in its epoch, from 0."""
    epoch: int
    data: Any
    rng: RngState
    """The states before the batch."""
    versions: tuple[int, ...]
    """The version counters of its tensors then."""

    @property
    def unchanged(self) -> bool:
        """Whether none of its tensors was edited in place since, within the limits of `tensors_of`."""
        return self.versions == version_counters(self.data)


def cuda_devices_of(model: nn.Module) -> tuple[torch.device, ...]:
    """The CUDA devices on which `model` has parameters or buffers."""
    if not torch.cuda.is_initialized():
        return ()
    # one walk: `parameters` and `buffers` would go through the modules once each, and take three times as long
    tensors = (t for module in model.modules() for t in (*module._parameters.values(), *module._buffers.values()))
    return tuple(dict.fromkeys(tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda))


def tensors_of(
    data: object, path: str = "", depth: int = MAX_DEPTH, *, objects: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with their paths in it ('[0]', "['image']"), within `MAX_DEPTH` and `MAX_ITEMS`.

    `objects`: those in attributes of objects too, as of a graph ('.edges').
    """
    if isinstance(data, Tensor):
        yield path, data
        return
    if not depth or (isinstance(data, list | tuple) and {*map(type, data[:MAX_ITEMS])} <= PLAIN):
        return
    parts: Iterator[tuple[str, object]]
    if isinstance(data, Mapping):
        parts = ((f"[{key!r}]", item) for key, item in data.items())
    elif isinstance(data, list | tuple):
        parts = ((f"[{i}]", item) for i, item in enumerate(data))
    elif dataclasses.is_dataclass(data):
        parts = ((f".{field.name}", getattr(data, field.name, None)) for field in dataclasses.fields(data))
    elif objects and hasattr(data, "__dict__") and not isinstance(data, type | nn.Module):
        parts = ((f".{name}", item) for name, item in vars(data).items())
    else:
        return
    for name, item in islice(parts, MAX_ITEMS):
        yield from tensors_of(item, path + name, depth - 1, objects=objects)


def version_counters(data: object) -> tuple[int, ...]:
    """The version counters of the tensors in a batch, within the limits of `tensors_of`."""
    try:
        # most batches are lists of tensors, which takes a quarter of the time of the search (measured)
        flat = isinstance(data, list | tuple) and len(data) <= MAX_ITEMS and {*map(type, data)} <= {Tensor}
        tensors: Iterable[Tensor] = data if flat else [tensor for _, tensor in tensors_of(data, objects=True)]  # type: ignore[assignment]
        return (
            tuple(map(version_of, tensors)) if any(map(Tensor.is_inference, tensors)) else tuple(map(_VERSION, tensors))
        )
    except Exception:  # a batch may be an object of the user's own making
        return ()
