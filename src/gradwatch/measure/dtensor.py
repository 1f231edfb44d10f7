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


def local_tensor(tensor: Any) -> Tensor:
    """The part of a DTensor on this rank, as a plain tensor that shares its memory and version; other tensors as is.

    A partial sum is completed first, in a collective call.
    """
    with torch.no_grad():
        if is_partial(tensor):
            replicate = sys.modules["torch.distributed.tensor"].Replicate()
            tensor = tensor.redistribute(placements=[replicate if p.is_partial() else p for p in tensor.placements])
        return stored_part(tensor)


def is_partial(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor whose sum over ranks is pending (a `Partial` placement)."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def stored_part(tensor: Any) -> Tensor:
    """The part of `tensor` stored on this rank, to be written to: of a partial sum, this rank's summand."""
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return part


def is_row_sharded(tensor: Any) -> bool:
    """Whether this rank stores whole rows of `tensor` along the first dimension, or all of it."""
    if not is_dtensor(tensor) or all(placement.is_replicate() for placement in tensor.placements):
        return True
    return tensor.ndim > 1 and all(p.is_replicate() or p.is_shard(0) for p in tensor.placements)


def full_tensor(tensor: Any) -> Tensor:
    """All of `tensor`; a collective call for a DTensor."""
    full: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return full


def shard_like(full: Tensor, like: Any) -> Tensor:
    """The part of `full` on this rank, sharded like the DTensor `like`."""
    module, mesh = sys.modules["torch.distributed.tensor"], like.device_mesh
    replicated = module.DTensor.from_local(full, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    part: Tensor = replicated.redistribute(placements=like.placements).to_local()
    return part


def largest_part(tensor: Any) -> int:
    """The largest number of elements of `tensor` on one rank; the same on every rank."""
    if not is_dtensor(tensor):
        return int(tensor.numel())
    return -(-int(tensor.numel()) // (int(tensor.device_mesh.size()) // replicas(tensor)))


def replicas(parameter: Any) -> int:
    """The number of ranks of its mesh that hold each element of a sharded parameter."""
    copied = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return prod(int(parameter.device_mesh.size(dim)) for dim in copied)
