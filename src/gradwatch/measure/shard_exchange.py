"""The exchange of sharded parameters' norms between ranks: an all-reduce of those of parts to those of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from gradwatch.core.record import Floats
from gradwatch.measure.device_buffer import ROWS, DeviceBuffer, HostCopy, Places
from gradwatch.measure.devices import current_stream, moved, widest_type
from gradwatch.measure.dtensor import is_dtensor, replicas

SUMMED = frozenset({"zeros", "edited"})
"""Rows whose numbers add up over ranks; all other rows hold norms, whose squares add up."""


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
        self._width = 1 + self.ranks + buffer.places
        self._room = torch.zeros(1 + ROWS * self._width, dtype=widest_type(self._device), device=self._device)
        self._rows = buffer["grad_norm"].new_full((ROWS, buffer.places + 1), torch.nan)
        self._losses = torch.zeros(ROWS, dtype=self._counts.dtype, device=buffer.device)
        self._stream: Any = None
        """The stream that wrote the last row."""
        self.latest: dict[str, Tensor] = {}
        """Row of the buffer -> its numbers in the last exchange at a step, on the device; "broken": the number of ranks
        that had trouble.
        """

    def on_any_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank; every rank has to ask."""
        answer = torch.full((1,), float(flag), dtype=self._room.dtype, device=self._device)
        self._sum(answer)
        return bool(HostCopy({"flag": answer}).wait()["flag"][0])

    def put(self, row: int, name: str) -> None:
        """Keep the numbers that the buffer has now under `name`, as row `row` of the next exchange."""
        self._stream = current_stream(self._buffer.device, self._stream)
        self._rows[row].copy_(self._buffer[name])

    def put_loss(self, row: int, loss: Tensor) -> None:
        """Keep `loss`, 0-d, beside row `row`."""
        self._losses[row].copy_(loss.detach(), non_blocking=not self._losses.is_cpu)

    def all_reduce(
        self,
        size: int,
        filled: Mapping[int, tuple[str, Places]],
        lossy: Sequence[int],
        errors: list[Exception],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first `size` rows of whole parameters, from those of this rank's parts, in one collective call.

        `filled`: those that this rank has: the row of the buffer and the slot of each parameter there, -1 for none;
        `lossy`: those with a loss. Returns the numbers, shape [size, parameters + 1], the last NaN, as are rows that
        not all ranks have; by how many ranks each is filled, shape [size]; ones for ranks whose loss is not finite,
        shape [size, ranks]; and the number of ranks with `errors`, shape [1].

        What fails before the call is put into `errors`: the other ranks wait.
        """
        together = self._room[: 1 + size * self._width]
        together.zero_()
        try:
            self._write(together[1:].view(size, self._width), filled, lossy)
        except Exception as error:
            errors.append(error)
            together.zero_()
        if errors:
            together[:1].fill_(1.0)
        self._sum(together)
        together = moved(together, self._buffer.device) if self._device != self._buffer.device else together.clone()
        rows = together[1:].view(size, self._width)
        whole, sums = rows[:, :1] == self.ranks, rows[:, 1 + self.ranks :]
        numbers = torch.where(moved(_summed(size, filled), sums.device), sums, sums.sqrt())
        numbers = torch.cat([torch.where(whole, numbers, torch.nan), torch.full_like(rows[:, :1], torch.nan)], dim=1)
        return numbers, rows[:, 0], rows[:, 1 : 1 + self.ranks], together[:1]

    def losses(self, size: int) -> Tensor:
        """Those beside the first `size` rows, of this rank."""
        return self._losses[:size]

    def _sum(self, numbers: Tensor) -> None:
        for group in self._groups:
            distributed.all_reduce(numbers, group=group)

    def _write(self, rows: Tensor, filled: Mapping[int, tuple[str, Places]], lossy: Sequence[int]) -> None:
        """Write this rank's part of an exchange to `rows`: squares of norms, by how many ranks their parts are held."""
        size, places, device = len(rows), self._buffer.places, self._buffer.device
        self._stream = current_stream(device, self._stream)
        slots, here, known = np.full((size, places), -1, dtype=np.intp), np.zeros(size), np.zeros(size, dtype=bool)
        for row, (_, taken) in filled.items():
            slots[row], here[row] = taken, 1.0
        known[list(lossy)] = True
        bad = ~torch.isfinite(self._losses[:size]) & moved(torch.from_numpy(known), device)
        there = moved(torch.from_numpy(slots), device)
        numbers = self._rows[:size].gather(1, torch.where(there >= 0, there, places)).to(self._counts.dtype)
        numbers = torch.where(moved(_summed(size, filled), device), numbers, numbers.square()) * self._counts
        numbers = torch.where((there >= 0) & (self._counts > 0), numbers, 0.0)
        rows[:, 0] = moved(torch.from_numpy(here), self._device, rows.dtype)
        rows[:, 1 + self.rank] = moved(bad, self._device, rows.dtype)
        rows[:, 1 + self.ranks :] = moved(numbers, self._device, rows.dtype)


def _summed(size: int, filled: Mapping[int, tuple[str, Places]]) -> Tensor:
    """Which of `size` rows hold numbers that add up, not norms: shape [size, 1], on the host."""
    return torch.tensor([[row in filled and filled[row][0] in SUMMED] for row in range(size)])


class ShardBlock:
    """Rows of this rank's parts, of some steps, until one all-reduce makes them those of whole parameters.

    All ranks reserve the same rows; one that has failed fills none from then on.
    """

    def __init__(self, reducer: ShardReducer, size: int) -> None:
        """`size`: rows that are exchanged, filled or not; one block of a reducer at a time."""
        self.count = 0
        """Rows that are reserved."""
        self.host_copy: HostCopy | None = None
        """The numbers of whole parameters on their way to the host, once they were exchanged."""
        self.reducer, self._size = reducer, size
        self._filled: dict[int, tuple[str, Places]] = {}
        self._lossy: list[int] = []
        self._numbers: tuple[Floats, Floats] | None = None

    def reserve(self, rows: int) -> int:
        """Reserve `rows` more; the first of them."""
        first, self.count = self.count, self.count + rows
        return first

    def fill(self, row: int, name: str, slots: Places) -> None:
        """Take the present numbers of the row `name` of the buffer. `slots`: of each parameter there, -1 for none."""
        self.reducer.put(row, name)
        self._filled[row] = name, slots

    def add_loss(self, row: int, loss: Tensor) -> None:
        """Take the loss of a step on this rank, 0-d, whose norms are in `row`."""
        self.reducer.put_loss(row, loss)
        self._lossy.append(row)

    def exchange(self, errors: list[Exception]) -> tuple[Tensor, Tensor]:
        """Exchange all rows; every rank has to. With `errors` this rank is in trouble, and the others learn of it.

        The numbers, shape [rows, parameters + 1], and the number of ranks in trouble, shape [1], on the device.
        """
        numbers, filled, bad, trouble = self.reducer.all_reduce(self._size, self._filled, self._lossy, errors)
        parts = {"numbers": numbers, "filled": filled, "bad": bad, "losses": self.reducer.losses(self._size)}
        self.host_copy = HostCopy({"trouble": trouble, **{name: part.reshape(-1) for name, part in parts.items()}})
        return numbers, trouble

    def send(self) -> HostCopy:
        assert self.host_copy is not None, "it was exchanged"
        return self.host_copy

    def wait(self) -> tuple[Floats, Floats]:
        """Numbers of whole parameters, shape [rows, parameters + 1], the last NaN, as are rows that a rank lacks; and
        this rank's losses, shape [rows]. Waits for the copy.
        """
        if self._numbers is None:
            numbers = self.send().wait()
            self._numbers = numbers["numbers"].reshape(self._size, -1), numbers["losses"]
        return self._numbers

    def is_whole(self, row: int) -> bool:
        """Whether every rank has filled `row`."""
        return bool(self.send().wait()["filled"][row] == self.reducer.ranks)

    def bad_rank(self, row: int) -> int | None:
        """The first rank whose loss beside `row` was not finite."""
        bad = np.flatnonzero(self.send().wait()["bad"].reshape(self._size, -1)[row])
        return int(bad[0]) if len(bad) else None

    @property
    def trouble(self) -> bool:
        """Whether a rank was in trouble when it was exchanged."""
        return bool(self.send().wait()["trouble"][0])


def _ranks_holding(parameter: Any, ranks: int) -> int:
    """The number of all ranks that hold each element of a sharded parameter."""
    return ranks // int(parameter.device_mesh.size()) * replicas(parameter)


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
