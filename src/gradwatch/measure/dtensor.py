"""Sharded parameters (DTensors): the part on this rank, and the all-reduce of norms of parts to norms of the whole."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from gradwatch.measure.device_buffer import DeviceBuffer, HostCopy
from gradwatch.measure.devices import moved
from gradwatch.measure.reductions import widest_type
from gradwatch.measure.site_values import Places

MAX_ROWS = 3
"""Rows of the buffer that are exchanged together, at most: those that a sampled step has before its optimizer moves."""

SUMMED = frozenset({"zeros"})
"""Rows whose numbers add up over ranks; all other rows hold norms, whose squares add up."""


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    # importing this module takes long; while it is not imported there is no DTensor
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank, as a plain tensor that shares its memory and version; other tensors as is.

    A partial sum is completed first, in a collective call.
    """
    if not is_dtensor(tensor):
        return tensor
    shard: Any = tensor
    with torch.no_grad():
        if is_partial(tensor):
            replicate = sys.modules["torch.distributed.tensor"].Replicate()
            shard = shard.redistribute(placements=[replicate if p.is_partial() else p for p in shard.placements])
        part: Tensor = shard.to_local()
    return part


def is_partial(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor whose sum over ranks is pending (a `Partial` placement)."""
    shard: Any = tensor
    return is_dtensor(tensor) and any(placement.is_partial() for placement in shard.placements)


def stored_part(tensor: Tensor) -> Tensor:
    """The part of `tensor` stored on this rank, to be written to: of a partial sum, this rank's summand."""
    shard: Any = tensor
    part: Tensor = shard.to_local() if is_dtensor(tensor) else tensor
    return part


def is_row_sharded(tensor: Tensor) -> bool:
    """Whether this rank stores whole rows of `tensor` along the first dimension, or all of it."""
    shard: Any = tensor
    if not is_dtensor(tensor) or all(placement.is_replicate() for placement in shard.placements):
        return True
    return shard.ndim > 1 and all(p.is_replicate() or p.is_shard(0) for p in shard.placements)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of `tensor`; a collective call for a DTensor."""
    shard: Any = tensor
    full: Tensor = shard.full_tensor() if is_dtensor(tensor) else tensor
    return full


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """The part of `full` on this rank, sharded like the DTensor `like`."""
    module, shard = sys.modules["torch.distributed.tensor"], like
    mesh: Any = getattr(shard, "device_mesh")  # noqa: B009 (only DTensors have it)
    placements: Any = getattr(shard, "placements")  # noqa: B009
    all_reduce = module.DTensor.from_local(full, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = all_reduce.redistribute(placements=placements).to_local()
    return part


def largest_part(tensor: Tensor) -> int:
    """The largest number of elements of `tensor` on one rank; the same on every rank."""
    if not is_dtensor(tensor):
        return tensor.numel()
    shard: Any = tensor
    return -(-tensor.numel() // (int(shard.device_mesh.size()) // _replicas(shard)))


class ShardReducer:
    """Reduces the rows of a buffer over the ranks that hold the parameters."""

    def __init__(self, parameters: Sequence[Any], buffer: DeviceBuffer) -> None:
        """Raises ValueError where no mesh has the ranks of all parameters."""
        meshes = [parameter.device_mesh if is_dtensor(parameter) else None for parameter in parameters]
        known = [mesh for mesh in meshes if mesh is not None]
        world = distributed.get_world_size()
        largest = max(known, key=lambda mesh: mesh.size())
        self.ranks = int(largest.size())
        if self.ranks == world:
            self._groups: list[Any] = [None]  # of all ranks
        elif all(mesh == largest for mesh in known):
            self._groups = [largest.get_group(dim) for dim in range(largest.ndim)]
        else:
            raise ValueError("the parameters lie on meshes of different ranks, and none has them all")
        everyone = self._groups == [None]
        coordinate = largest.get_coordinate()
        first = distributed.get_rank() == 0 if everyone else not any(coordinate or ())
        self.rank = distributed.get_rank() if everyone else int(np.ravel_multi_index(coordinate, largest.mesh.shape))
        # a plain parameter counts as the first rank has it: some are not reduced, and all ranks have to agree
        counts = [
            float(first) if mesh is None else 1.0 / _ranks_holding(parameter, self.ranks)
            for parameter, mesh in zip(parameters, meshes, strict=True)
        ]
        self._counts = moved(torch.tensor(counts, dtype=torch.float64), buffer.device)
        self._buffer = buffer
        # parameters that are offloaded to the CPU are still reduced on the mesh's own device
        self._device = buffer.device
        if largest.device_type != buffer.device.type:
            self._device = torch.device(largest.device_type, torch.accelerator.current_device_index())
        # made now: an allocation that fails on one rank alone would leave the others waiting
        size = 1 + self.ranks + MAX_ROWS * buffer.places
        self._room = torch.zeros(size, dtype=widest_type(self._device), device=self._device)
        self.latest: dict[str, Tensor] = {}
        """Row -> result of the last `all_reduce`, on the device."""

    def all_reduce(
        self,
        index: Mapping[str, Places],
        *,
        loss: Tensor | None = None,
        broken: bool = False,
        errors: list[Exception] | None = None,
    ) -> tuple[HostCopy, dict[str, Places]]:
        """The numbers of whole parameters from those of this rank's parts, in one collective call.

        `index`: row of the buffer -> the slot of each parameter, -1 for none. Returns the rows in the order of the
        parameters, and the slots there. Two more rows are "broken", the number of ranks that passed `broken`, and
        "bad", shape [ranks], which is 1 for ranks with a non-finite `loss`.

        What fails before the call is put into `errors`, and counts as `broken`: the other ranks wait.
        """
        places, errors = self._buffer.places, [] if errors is None else errors
        together = self._room[: 1 + self.ranks + len(index) * places]
        together.zero_()
        try:
            if loss is not None:
                together[1 + self.rank] = moved(~torch.isfinite(loss), self._device, together.dtype)
            rows = together[1 + self.ranks :].view(len(index), places)
            for out, (row, slots) in zip(rows, index.items(), strict=True):
                out.copy_(moved(self._weighted_row(row, slots), self._device))
        except Exception as error:
            errors.append(error)
            together.zero_()
            broken = True
        if broken:
            together[:1].fill_(1.0)
        for group in self._groups:
            distributed.all_reduce(together, group=group)
        together = moved(together, self._buffer.device) if self._device != self._buffer.device else together.clone()
        device, wide = together.device, together.dtype
        parts = together[1 + self.ranks :].view(len(index), places)
        none = torch.full((1,), torch.nan, dtype=wide, device=device)
        numbers = {
            row: torch.cat([part if row in SUMMED else part.sqrt(), none])
            for row, part in zip(index, parts, strict=True)
        }
        self.latest |= numbers | {"broken": together[:1]}
        host_copy = HostCopy({**numbers, "broken": together[:1], "bad": together[1 : 1 + self.ranks]})
        return host_copy, {row: np.where(slots >= 0, np.arange(places), -1) for row, slots in index.items()}

    def _weighted_row(self, row: str, slots: Places) -> Tensor:
        there = moved(torch.from_numpy(slots), self._buffer.device)
        numbers = self._buffer[row][there].to(self._counts.dtype)
        if row not in SUMMED:
            numbers = numbers.square()
        counted = numbers * self._counts
        return torch.where((there >= 0) & (self._counts > 0), counted, torch.zeros_like(counted))


def _ranks_holding(parameter: Any, ranks: int) -> int:
    """The number of all ranks that hold each element of a sharded parameter."""
    return ranks // int(parameter.device_mesh.size()) * _replicas(parameter)


def _replicas(parameter: Any) -> int:
    """The number of ranks of its mesh that hold each element of a sharded parameter."""
    copied = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return prod(int(parameter.device_mesh.size(dim)) for dim in copied)


class DeferredErrors:
    """A context that, with shards, keeps an error for the next collective call, in which the other ranks wait."""

    def __init__(self, errors: list[Exception]) -> None:
        self.on = False
        """Whether there are shards; without them errors pass."""
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not self.on or not isinstance(error, Exception):
            return False
        self._errors.append(error)
        return True
