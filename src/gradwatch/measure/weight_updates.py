"""How far the weights move in a step: copies of them from before it, and the norms of the differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.measure.device_buffer import DeviceBuffer, host_view, on_host
from gradwatch.measure.devices import moved
from gradwatch.measure.reductions import ENLARGED, NARROW, NORM, SMALL, STACK, Plan, recompute, safe_norms

COPY_BYTES = 4 * 2**20
"""Bytes of weights copied on a sampled step for `update_ratio`; larger models copy some parameters at a time.
Judgement."""


class UpdateNorms:
    """Copies weights before a step and compares them after it: all, or turn by turn as many as `COPY_BYTES` allow."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """`sizes`: number of elements of each tensor and bytes of an element. All ranks pass the same, to copy the same
        tensors. Empty tensors are not copied; of one larger than `COPY_BYTES` every k-th element is.
        """
        self._turns: list[dict[int, int]] = []
        """For each turn, index of a tensor -> stride between its copied elements."""
        room = 0
        for member, (count, width) in enumerate(sizes):
            if count:
                stride = -(-count * width // COPY_BYTES)
                needed = -(-count // stride) * width
                if needed > room:
                    room = COPY_BYTES
                    self._turns.append({})
                room -= needed
                self._turns[-1][member] = stride
        self._copies_of_turn: dict[int, _WeightCopies] = {}
        self._current: _WeightCopies | None = None

    def copy(self, weights: Sequence[Any], buffer: DeviceBuffer, *, turn: int) -> None:
        """Copy those of `weights`, one per tensor of `sizes`, whose turn it is. `turn` counts the samples."""
        self.drop()
        if not self._turns:
            return
        turn %= len(self._turns)
        try:
            copies = self._copies_of_turn[turn]
            copies.make(weights)
        except (KeyError, RuntimeError):  # none was made, or some have other shapes than last time
            copies = self._copies_of_turn[turn] = _WeightCopies(self._turns[turn], weights, buffer)
            copies.make(weights)
        self._current = copies

    def drop(self) -> None:
        """Free the copies."""
        if self._current is not None:
            self._current.drop()
        self._current = None

    def compare(self, weights: Sequence[Any]) -> list[int]:
        """Write the norms of the differences into the row `updates` and free the copies. Returns the index of the
        weight of each slot, from the first on; empty where there are no copies, or a weight has changed its shape.
        """
        if self._current is None:
            return []
        try:
            self._current.compare(weights)
            return self._current.members
        except RuntimeError:
            return []
        finally:
            self.drop()


class _WeightCopies:
    """The copies of one turn, made in few kernels: small tensors of one shape are stacked, others copied together."""

    def __init__(self, strides: dict[int, int], weights: Sequence[Any], buffer: DeviceBuffer) -> None:
        """`strides`: index of a weight -> stride between its copied elements."""
        self._buffer = buffer
        self._copies: list[Tensor] = []
        alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for member, stride in strides.items():
            weight = weights[member]
            small = stride == 1 and 0 < weight.numel() <= SMALL and weight.is_floating_point()
            plain = small and weight.layout is torch.strided
            alike[(weight.dtype, weight.device, weight.shape) if plain else (member,)].append(member)
        parts = [
            members[start : start + height]
            for members in alike.values()
            for height in (max(1, STACK // max(1, weights[members[0]].numel())),)
            for start in range(0, len(members), height)
        ]
        stacked = [part for part in parts if len(part) > 1]
        self._stacks: list[Callable[[Any], tuple[Tensor, ...]]] = [itemgetter(*part) for part in stacked]
        self._singles = [(part[0], strides[part[0]]) for part in parts if len(part) == 1]
        self._shapes = [weights[member].shape for member, _ in self._singles]
        samples = self._samples(weights)
        first = sum(map(len, stacked))
        self._plan = Plan([_wide(sample) for sample in samples], buffer["updates"][first:])
        order = self._plan.positions
        self.members = [member for part in stacked for member in part] + [self._singles[i][0] for i in order]
        """Index of the weight of each slot."""
        whole = [weights[member].numel() for member in self.members]
        self._safe = safe_norms(whole[:first])
        counts = whole[:first] + [samples[i].numel() for i in order]
        scales = [(all_of / count) ** 0.5 if count else 1.0 for all_of, count in zip(whole, counts, strict=True)]
        self._scales = moved(torch.tensor(scales, dtype=buffer["updates"].dtype, device="cpu"), buffer.device)
        """Factors that make norms of every k-th element estimates for whole tensors."""
        self._scaled = any(scale != 1.0 for scale in scales)

    def make(self, weights: Sequence[Any]) -> None:
        """Copy the weights. Raises RuntimeError, and makes no copy, where weights have changed their shapes."""
        if [weights[member].shape for member, _ in self._singles] != self._shapes:
            raise RuntimeError("the weights have other shapes than planned for")
        stacks = [torch.stack(choose(weights)) for choose in self._stacks]
        self._copies = stacks + _wide_copies(self._samples(weights))

    def drop(self) -> None:
        self._copies = []

    def compare(self, weights: Sequence[Any]) -> None:
        """Write the norms into the row `updates`. Raises RuntimeError where a weight has changed its shape."""
        before = self._copies
        after = [torch.stack(choose(weights)) for choose in self._stacks] + self._samples(weights)
        if [tensor.shape for tensor in after] != [tensor.shape for tensor in before]:
            raise RuntimeError("the weights have other shapes than before the step")
        count = len(self._stacks)
        stacks = [_difference(new, old) for new, old in zip(after[:count], before[:count], strict=True)]
        self._norms(stacks + _subtracted(before[count:], after[count:]))

    def _norms(self, tensors: Sequence[Tensor]) -> None:
        out, count, slot = self._buffer["updates"], len(self._stacks), 0
        stacks = [stack.view(len(stack), -1) for stack in tensors[:count]]
        for rows in stacks:
            NORM.rows(rows, out[slot : slot + len(rows)])
            slot += len(rows)
        if stacks and (norms := host_view(out[:slot])) is not None:
            recompute(norms, self._safe, lambda slot: [*chain(*stacks)][slot], partial(_enlarged_norms, stacks))
        self._plan.run(tensors[count:])
        if self._scaled:
            out[: len(self.members)].mul_(self._scales)

    def _samples(self, weights: Sequence[Any]) -> list[Tensor]:
        return [
            weights[member] if stride == 1 else weights[member].reshape(-1)[::stride]
            for member, stride in self._singles
        ]


def _enlarged_norms(stacks: Sequence[Tensor], rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """As of `Plan`; with a learning rate of 0, in a warm-up, no weight moves."""
    parts = [on_host(torch.linalg.vector_norm(stack * ENLARGED, dim=1)) for stack in stacks]
    return np.concatenate(parts)[rows] / ENLARGED


def _wide(weights: Tensor) -> Tensor:
    """`weights` in float32 or wider."""
    return weights.float() if weights.dtype in NARROW else weights


def _difference(new: Tensor, old: Tensor) -> Tensor:
    """New - old in float32 or wider, as fp16 cannot hold every difference of fp16 weights. May overwrite `old`."""
    return old.sub_(new) if _wide(old) is old else _wide(new) - _wide(old)


def _wide_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of `tensors`, in float32 or wider: a few kernels."""
    if not tensors:
        return []
    copies = [torch.empty_like(tensor, dtype=torch.float32 if tensor.dtype in NARROW else None) for tensor in tensors]
    for mine, theirs in _alike(copies, tensors):
        torch._foreach_copy_(mine, theirs)
    return copies


def _subtracted(old: list[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    """New - old, up to their sign, in place of `old`, which are wide copies: a few kernels."""
    narrow = [place for place, (before, after) in enumerate(zip(old, new, strict=True)) if before.dtype != after.dtype]
    after = list(new)
    for place, wide in zip(narrow, _wide_copies([new[place] for place in narrow]), strict=True):
        after[place] = wide
    for mine, theirs in _alike(old, after):
        torch._foreach_sub_(mine, theirs)
    return old


def _alike(copies: Sequence[Tensor], tensors: Sequence[Tensor]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Both, those on one device and of one type together."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for copy, tensor in zip(copies, tensors, strict=True):
        mine, theirs = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        mine.append(copy)
        theirs.append(tensor)
    return groups.values()
