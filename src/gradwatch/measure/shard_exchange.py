"""The exchange between ranks that makes norms of whole sharded parameters from those of each rank's parts.

A step goes the same way on all ranks, also on one where something of ours has failed. First, before all that may fail
on one of them alone, they exchange the rows that wait if that `is_due`, and `begin`: which rows the step has follows
from the number of steps alone. Then they `add` what each reads of its parts, before the optimizer moves and after it;
an error goes into `errors`, and from then on this rank adds nothing. An exchange is one all-reduce of the rows of many
steps, or, where somebody waits for each step, of what was just added; a row that one rank lacks is NaN on all. They
learn from it whether one has errors, and `check` raises on all of them before the same later exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from gradwatch.measure.device_buffer import (
    AFTER,
    BEFORE,
    IN_FLIGHT,
    ROWS,
    BlockNumbers,
    DeviceBuffer,
    HostCopy,
    Indices,
)
from gradwatch.measure.devices import current_stream, moved, widest_type
from gradwatch.measure.dtensor import is_dtensor, replicas

SUMMED = frozenset({"zeros", "edited"})
"""Rows whose numbers add up over ranks; all other rows hold norms, whose squares add up."""

UNDER_WAY = IN_FLIGHT + 2
"""Exchanges that may be under way when the next begins, where there is one at every step: no rank waits for the device,
and by then every rank has judged the steps before. Between exchanges of many steps there is time for that."""


class ShardExchange:
    """What this rank exchanges with all others: the rows of the steps, and whether it has errors."""

    def __init__(self, reducer: ShardReducer, errors: list[Exception]) -> None:
        self.reducer = reducer
        """That of the present parameters."""
        self.errors = errors
        """Of this rank; where there are any, the next exchange tells the others."""
        self.waits = False
        """Whether the rows of a step wait for those of others; if not, somebody waits for each step."""
        self.steps = 0
        """Since rows that wait were last exchanged, measured or not."""
        self.over = False
        """Whether no rank enters another exchange."""
        self.clipped = False
        """Whether gradients are read again after every step: they are clipped then, as far as all ranks know."""
        self.latest: dict[str, Tensor] = {}
        """Row of the buffer -> its numbers in the last exchange at a step, on the device; "failed": the number of ranks
        that had errors.
        """
        self._number = 0
        """Of the exchange to come, which all ranks count alike."""
        self._clipped_from = inf
        """The exchange from which on all ranks know of a clipping that one has seen."""
        self._block: ShardBlock | None = None
        """The rows that wait."""
        self._unchecked: deque[ShardBlock] = deque()
        """Exchanges of which it was not seen whether a rank had errors."""
        self._slots: dict[str, tuple[Indices, Indices]] = {}
        """Row of the buffer -> the slots of each parameter's part that were seen there last, and those of the whole."""

    @property
    def is_due(self) -> bool:
        """Whether the rows that wait may have no room for one more step, or have waited for `ROWS` steps."""
        full = self._block is not None and len(self._block.rows) + len(BEFORE) + len(AFTER) > ROWS
        return self.waits and (full or self.steps > ROWS)

    @property
    def is_outdated(self) -> bool:
        """Whether parameters were replaced since rows began to wait: those have no place among the present ones."""
        return self._block is not None and self._block.reducer is not self.reducer

    def begin(self, *, sampled: bool) -> None:
        """A measured step begins. Raises as `check` does, if it need not wait."""
        if not self.waits:
            self.check(UNDER_WAY)
            self._number += 1
        self.clipped |= self._number >= self._clipped_from
        if self.waits:
            self._block = self._block or ShardBlock(self, ROWS, self._number)
            self._block.rows += BEFORE + AFTER if sampled else BEFORE[:1] + AFTER[:1] * self.clipped

    def add(
        self, rows: Sequence[str], index: Mapping[str, Indices], loss: Tensor | None = None
    ) -> tuple[ShardBlock, int, dict[str, Indices]]:
        """Take `rows` of the buffer, which are the same on every rank, as they are now, and the `loss` of a step.

        `index`: those that this rank has -> the slot of each parameter, -1 for none. Returns the block that has them,
        the place of the first, and the slots of whole parameters there.
        """
        block = self._block if self.waits else ShardBlock(self, len(rows), self._number, rows)
        assert block is not None, "the step has begun"
        first = max(place for place, row in enumerate(block.rows) if row == rows[0])
        with DeferredErrors(self.errors):
            if not self.errors:
                self.reducer.put(block, first, index, loss)
        if not self.waits:
            numbers, failed = self.reducer.all_reduce(block, self.errors)
            self.latest |= {**dict(zip(rows, numbers, strict=True)), "failed": failed}
            if rows[0] == BEFORE[0]:
                self._unchecked.append(block)
        none = np.full(self.reducer.buffer.places, -1, dtype=np.intp)
        return block, first, {row: self._of_whole(row, index.get(row, none)) for row in rows}

    def exchange(self) -> ShardBlock | None:
        """Exchange the rows that wait; None where there are none. Raises as `check` does."""
        self.check()
        self.steps = 0
        block, self._block = self._block, None
        if block is not None:
            block.reducer.all_reduce(block, self.errors)
            self._unchecked.append(block)
            self._number += 1
        return block

    def check(self, under_way: int = 0) -> None:
        """Raise where a rank had errors at an exchange, but for the last `under_way`: all ranks do so before the same
        one, and it is `over`.
        """
        while len(self._unchecked) > under_way:
            if self._unchecked.popleft().failed:
                self.over = True
                raise self.errors[0] if self.errors else RuntimeError("something failed on another rank")

    def expect_clipping(self, block: ShardBlock) -> None:
        """A sample in `block` has shown that the gradients change after they were measured.

        A rank that has failed since does not learn of it: ranks wait until all have stopped because of that.
        """
        self._clipped_from = min(self._clipped_from, block.number + 2 * (1 if self.waits else UNDER_WAY + 1))

    def _of_whole(self, row: str, slots: Indices) -> Indices:
        """The slots of whole parameters, which lie in their order; -1 where this rank has no part."""
        seen = self._slots.get(row)
        if seen is None or seen[0] is not slots:
            seen = self._slots[row] = slots, np.where(slots >= 0, np.arange(len(slots)), -1)
        return seen[1]


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
        self.global_ranks: list[int] = list(range(world)) if everyone else largest.mesh.flatten().tolist()
        """The numbers of these ranks among all."""
        first = distributed.get_rank() == 0 if everyone else not any(coordinate or ())
        self.rank = distributed.get_rank() if everyone else int(np.ravel_multi_index(coordinate, largest.mesh.shape))
        # a part counts by how many ranks have it; a plain parameter as the first rank has it: some are not reduced, and
        # all ranks have to agree
        counts = [
            float(first) if mesh is None else 1.0 / (self.ranks // int(mesh.size()) * replicas(parameter))
            for parameter, mesh in zip(parameters, meshes, strict=True)
        ]
        self._counts = moved(torch.tensor(counts, dtype=torch.float64, device="cpu"), buffer.device)
        self.buffer = buffer
        # parameters that are offloaded to the CPU are still reduced on the mesh's own device
        self._device = buffer.device
        if largest.device_type != buffer.device.type:
            self._device = torch.device(largest.device_type, torch.accelerator.current_device_index())
        # made now: an allocation that fails on one rank alone would leave the others waiting
        self._width = 1 + self.ranks + buffer.places
        self._room = torch.zeros(1 + ROWS * self._width, dtype=widest_type(self._device), device=self._device)
        self._rows = buffer["grad_norm"].new_full((ROWS, buffer.places + 1), torch.nan)
        self._losses = torch.zeros(ROWS, dtype=self._counts.dtype, device=buffer.device)
        self._stream: Any = None
        """The stream that wrote the last row."""

    def on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank; every rank has to ask."""
        answer = torch.full((1,), float(flag), dtype=self._room.dtype, device=self._device)
        self._sum(answer)
        return bool(HostCopy({"flag": answer}).wait()["flag"][0])

    def put(self, block: ShardBlock, first: int, index: Mapping[str, Indices], loss: Tensor | None) -> None:
        """Keep what the buffer has now of the rows of `block` from `first` on, and beside it the `loss`, 0-d.

        `index`: row -> the slot of each parameter, -1 for none; rows that are not there are left out.
        """
        self._stream = current_stream(self.buffer.device, self._stream)
        for place, row in enumerate(block.rows[first:], first):
            if row in index:
                self._rows[place].copy_(self.buffer[row])
                block.filled[place] = index[row]
        if loss is not None:
            self._losses[first].copy_(loss.detach(), non_blocking=not self._losses.is_cpu)

    def all_reduce(self, block: ShardBlock, errors: list[Exception]) -> tuple[Tensor, Tensor]:
        """Make the rows of `block` those of whole parameters, in one collective call, and start their copy to the host.

        What fails before the call is put into `errors`: the other ranks wait. Returns the numbers, shape [rows,
        parameters + 1], the last NaN, as are rows that not all ranks have; and the number of ranks with `errors`, shape
        [1]; on the device.
        """
        size = block.size
        together = self._room[: 1 + size * self._width]
        together.zero_()
        try:
            self._write(together[1:].view(size, self._width), block)
        except Exception as error:
            errors.append(error)
            together.zero_()
        if errors:
            together[:1].fill_(1.0)
        self._sum(together)
        together = moved(together, self.buffer.device) if self._device != self.buffer.device else together.clone()
        rows, failed = together[1:].view(size, self._width), together[:1]
        filled, bad, sums = rows.split([1, self.ranks, self.buffer.places], dim=1)
        numbers = torch.where(moved(block.summed, sums.device), sums, sums.sqrt())
        numbers = torch.where(filled == self.ranks, numbers, torch.nan)
        numbers = torch.cat([numbers, torch.full_like(filled, torch.nan)], dim=1)
        losses = self._losses[:size]
        block.host_copy = HostCopy(
            {"failed": failed, "numbers": numbers, "filled": filled, "bad": bad, "losses": losses}
        )
        self._losses.zero_()
        return numbers, failed

    def _sum(self, numbers: Tensor) -> None:
        for group in self._groups:
            distributed.all_reduce(numbers, group=group)

    def _write(self, rows: Tensor, block: ShardBlock) -> None:
        """Write this rank's part of an exchange to `rows`, shape [rows, 1 + ranks + parameters]: 1 where it has the
        row, 1 at its place where its loss is not finite, and squares of norms, by how many ranks their parts are held.
        """
        places, device = self.buffer.places, self.buffer.device
        self._stream = current_stream(device, self._stream)
        slots, here = np.full((block.size, places), -1, dtype=np.intp), np.zeros(block.size)
        for row, taken in block.filled.items():
            slots[row], here[row] = taken, 1.0
        there = moved(torch.from_numpy(slots), device)
        numbers = self._rows[: block.size].gather(1, torch.where(there >= 0, there, places)).to(self._counts.dtype)
        numbers = torch.where(moved(block.summed, device), numbers, numbers.square()) * self._counts
        numbers = torch.where((there >= 0) & (self._counts > 0), numbers, 0.0)
        rows[:, 0] = moved(torch.from_numpy(here), self._device, rows.dtype)
        rows[:, 1 + self.rank] = moved(~torch.isfinite(self._losses[: block.size]), self._device, rows.dtype)
        rows[:, 1 + self.ranks :] = moved(numbers, self._device, rows.dtype)


class ShardBlock:
    """Rows of this rank's parts, of some steps, until one all-reduce makes them those of whole parameters.

    One block of a reducer at a time.
    """

    def __init__(self, exchange: ShardExchange, size: int, number: int, rows: Sequence[str] = ()) -> None:
        """`size`: rows that are exchanged, filled or not; `number`: of the exchange, from 0."""
        self.exchange, self.reducer, self.size, self.number = exchange, exchange.reducer, size, number
        self.rows = [*rows]
        """The rows of the buffer that have a place here, on all ranks alike."""
        self.filled: dict[int, Indices] = {}
        """Place of a row that this rank has -> the slot of each parameter there, -1 for none."""
        self.host_copy: HostCopy | None = None
        """The numbers of whole parameters on their way to the host, once they were exchanged."""

    @property
    def summed(self) -> Tensor:
        """Which rows hold numbers that add up, not norms: shape [rows, 1], on the host."""
        known = [row in SUMMED for row in self.rows]
        return torch.tensor(known + [False] * (self.size - len(known)), device="cpu").unsqueeze(1)

    def send(self) -> HostCopy:
        assert self.host_copy is not None, "it was exchanged"
        return self.host_copy

    def wait(self) -> BlockNumbers:
        """Those of whole parameters, the last slot NaN, as are rows that a rank lacks, and this rank's losses. Waits
        for the copy.
        """
        numbers = self.send().wait()
        return BlockNumbers(numbers["numbers"], numbers["losses"])

    def is_whole(self, row: int) -> bool:
        """Whether every rank has filled `row`."""
        return bool(self.send().wait()["filled"][row, 0] == self.reducer.ranks)

    def bad_rank(self, row: int) -> int | None:
        """The number among all ranks of one whose loss beside `row` was not finite: this one, or the first."""
        bad, own = self.send().wait()["bad"][row], self.reducer.rank
        return self.reducer.global_ranks[own if bad[own] else int(bad.argmax())] if bad.any() else None

    @property
    def failed(self) -> bool:
        """Whether a rank had errors when it was exchanged."""
        return bool(self.send().wait()["failed"][0])


class DeferredErrors:
    """A context that keeps an error for the next exchange, in which the other ranks wait."""

    def __init__(self, errors: list[Exception]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self._errors.append(error)
        return isinstance(error, Exception)
