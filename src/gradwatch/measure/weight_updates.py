"""How far the weights move in a step: their copies, which live until after it, and the norms of the difference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gradwatch.measure.device_buffer import DeviceBuffer
from gradwatch.measure.reductions import NORM, SMALL, STACK, FloatLimits, Plan

COPY_BYTES = 4 * 2**20
"""Weights copied on a sampled step for `update_ratio`; in larger models the parameters take turns. Judgement."""

ROW = "updates"
"""Row of the buffer: norms of how far weights that were copied have moved since."""


class UpdateNorms:
    """Copies of weights from before a step: of all, or as many as `COPY_BYTES` allow, all of them in turns."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """`sizes`: elements of each tensor and bytes of an element, the same on all ranks that have to copy the same
        ones. Those without elements are never copied, of one larger than `COPY_BYTES` every k-th element is.
        """
        self._shares: list[dict[int, int]] = []
        """Member -> stride."""
        room = 0
        for member, (count, width) in enumerate(sizes):
            if count:
                stride = -(-count * width // COPY_BYTES)
                needed = -(-count // stride) * width
                if needed > room:
                    room = COPY_BYTES
                    self._shares.append({})
                room -= needed
                self._shares[-1][member] = stride
        self._made: dict[int, _Copies] = {}
        self._kept: _Copies | None = None
        self._turn = 0

    def keep(self, weights: Sequence[Any], buffer: DeviceBuffer) -> None:
        """Copy the share of `weights`, one per member, whose turn it is."""
        self.drop()
        if not self._shares:
            return
        turn = self._turn
        self._turn = (turn + 1) % len(self._shares)
        copies = self._made.get(turn)
        try:
            kept = copies is not None and copies.make(weights)
        except RuntimeError:
            kept = False  # some have other shapes than last time
        if copies is None or not kept:
            copies = self._made[turn] = _Copies(self._shares[turn], weights, buffer)
            copies.make(weights)
        self._kept = copies

    @property
    def kept(self) -> bool:
        """Whether there are copies."""
        return self._kept is not None

    def drop(self) -> None:
        """Let go of the copies."""
        if self._kept is not None:
            self._kept.drop()
        self._kept = None

    def moved(self, weights: Sequence[Any]) -> list[int]:
        """Take the norms of how far the copied weights have moved since, and let go of the copies; the member of each
        slot of `ROW`, from the first on. None, where a weight has changed its shape.
        """
        copies = self._kept
        if copies is None:
            return []
        try:
            return copies.members if copies.compare(weights) else []
        except RuntimeError:
            return []  # of one shape before the step and of several now
        finally:
            self.drop()


class _Copies:
    """How one share is copied in few kernels: small tensors of one shape stacked, the others one by one."""

    def __init__(self, share: dict[int, int], weights: Sequence[Any], buffer: DeviceBuffer) -> None:
        """`share`: member -> every which of its elements is copied."""
        self._buffer = buffer
        self._before: list[Tensor] = []
        alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for member, stride in share.items():
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
        self._singles = [(part[0], share[part[0]]) for part in parts if len(part) == 1]
        self._shapes = [weights[member].shape for member, _ in self._singles]
        samples = self._samples(weights)
        first = sum(map(len, stacked))
        self._plan = Plan([_wide(sample) for sample in samples], buffer[ROW][first:])
        order = self._plan.positions
        self.members = [member for part in stacked for member in part] + [self._singles[i][0] for i in order]
        """The member of each slot."""
        counts = [weights[member].numel() for member in self.members[:first]] + [samples[i].numel() for i in order]
        self._limits = FloatLimits(counts)
        whole = [weights[member].numel() for member in self.members]
        scales = [(all_of / count) ** 0.5 if count else 1.0 for all_of, count in zip(whole, counts, strict=True)]
        self._scales = torch.tensor(scales, dtype=buffer[ROW].dtype).to(buffer.device, non_blocking=True)
        """What norms are multiplied with to stand for whole tensors."""
        self._scaled = any(scale != 1.0 for scale in scales)

    def make(self, weights: Sequence[Any]) -> bool:
        """Copy; False, and no copy, where the weights no longer are of the shapes that this was made for."""
        if [weights[member].shape for member, _ in self._singles] != self._shapes:
            return False
        stacks = [torch.stack(choose(weights)) for choose in self._stacks]
        self._before = stacks + [sample.clone() for sample in self._samples(weights)]
        return True

    def drop(self) -> None:
        self._before = []

    def compare(self, weights: Sequence[Any]) -> bool:
        """Fill `ROW`; False where a weight has changed its shape."""
        before = self._before
        after = [torch.stack(choose(weights)) for choose in self._stacks] + self._samples(weights)
        if [tensor.shape for tensor in after] != [tensor.shape for tensor in before]:
            return False
        self._norms([_difference(new, old) for new, old in zip(after, before, strict=True)])
        return True

    def _norms(self, tensors: Sequence[Tensor]) -> None:
        out, count, slot = self._buffer[ROW], len(self._stacks), 0
        for stack in tensors[:count]:
            NORM.rows(stack.view(len(stack), -1), out[slot : slot + len(stack)])
            slot += len(stack)
        self._plan.run(tensors[count:])
        self._limits.recompute(self._buffer.view(ROW, len(self.members)), lambda place: self._in_slot(tensors, place))
        if self._scaled:
            out[: len(self.members)].mul_(self._scales)

    def _in_slot(self, tensors: Sequence[Tensor], place: int) -> Tensor:
        for stack in tensors[: len(self._stacks)]:
            if place < len(stack):
                return stack[place]
            place -= len(stack)
        return tensors[len(self._stacks) + self._plan.positions[place]]

    def _samples(self, weights: Sequence[Any]) -> list[Tensor]:
        return [
            weights[member] if stride == 1 else weights[member].reshape(-1)[::stride]
            for member, stride in self._singles
        ]


def _wide(weights: Tensor) -> Tensor:
    """In float32 at least."""
    return weights.float() if weights.dtype in (torch.float16, torch.bfloat16) else weights


def _difference(new: Tensor, old: Tensor) -> Tensor:
    """In float32 at least: fp16 weights may move further than fp16 can say. `old` is written over."""
    return old.sub_(new) if _wide(old) is old else _wide(new) - _wide(old)
