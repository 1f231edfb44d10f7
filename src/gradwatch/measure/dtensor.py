"""Sharded tensors (DTensors): the part on this rank, the whole, and how ranks share it."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    # importing this module takes long; while it is not imported there is no DTensor
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this rank, as a plain tensor that shares its memory and version; other tensors as is.

    A partial sum is completed first, in a collective call.
    """
    shard: Any = tensor
    with torch.no_grad():
        if is_partial(tensor):
            replicate = sys.modules["torch.distributed.tensor"].Replicate()
            shard = shard.redistribute(placements=[replicate if p.is_partial() else p for p in shard.placements])
        return stored_part(shard)


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


def shard_like(full: Tensor, like: Any) -> Tensor:
    """The part of `full` on this rank, sharded like the DTensor `like`."""
    module, mesh = sys.modules["torch.distributed.tensor"], like.device_mesh
    replicated = module.DTensor.from_local(full, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = replicated.redistribute(placements=like.placements).to_local()
    return part


def largest_part(tensor: Tensor) -> int:
    """The largest number of elements of `tensor` on one rank; the same on every rank."""
    if not is_dtensor(tensor):
        return tensor.numel()
    shard: Any = tensor
    return -(-tensor.numel() // (int(shard.device_mesh.size()) // replicas(shard)))


def replicas(parameter: Any) -> int:
    """The number of ranks of its mesh that hold each element of a sharded parameter."""
    copied = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return prod(int(parameter.device_mesh.size(dim)) for dim in copied)
