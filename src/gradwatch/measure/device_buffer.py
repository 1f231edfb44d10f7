"""The way of numbers from the device: a step's in preallocated slots, and their copy to the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.core.record import Floats
from gradwatch.hooks.hook_set import is_capturing
from gradwatch.measure import devices
from gradwatch.measure.devices import moved, widest_type

Indices = NDArray[np.intp]
"""Of parameters, sites or slots: the package's docstring tells them apart."""

BEFORE = ("grad_norm", "zeros", "weights")
"""Rows of the buffer that are read before the optimizer moves: the first at any step, the others on sampled steps."""

AFTER = ("grad_norm_clipped", "updates")
"""Those that are read after it: the first at any step, if at all."""

EDITED = ("edited_norm", "edited")
"""Those that interventions fill: norms after an edit, and 1 where it has changed a gradient."""


class DeviceBuffer:
    """Named rows of slots on the device, written by reductions and hooks.

    A row has a slot for each of `places` parameters, in an order of the writer's own, and a last one that stays NaN:
    where an index of -1 leads.

    float32 on the CPU, where float32 reductions are the fast ones and the edges can be had again in float64, unless
    there are doubles; float64 on other devices that have it, where nothing can be had again once the host has seen it.
    """

    def __init__(self, device: torch.device, places: int, rows: tuple[str, ...], *, doubles: bool = False) -> None:
        """`doubles`: whether there are numbers that float32 cannot hold."""
        self.device = device
        self.places = places
        dtype = torch.float32 if device.type == "cpu" and not doubles else widest_type(device)
        self._rows = {row: torch.full((places + 1,), torch.nan, dtype=dtype, device=device) for row in rows}

    def __getitem__(self, row: str) -> Tensor:
        return self._rows[row]

    def send(self, rows: Iterable[str]) -> HostCopy:
        """Start the copy of `rows` to the host; they may be written again as soon as this returns."""
        return HostCopy({row: self._rows[row] for row in rows})


ROWS = 64
"""Steps whose norms come to the host together. Judgement."""

IN_FLIGHT = 16
"""Steps for which a copy from the device may be in flight before it is waited for. Judgement."""

CLIP_CHECKS = 2
"""Gradients of a step whose norms are taken again after a clipping of all. Judgement."""


class BlockNumbers(NamedTuple):
    """The numbers of a block's rows, on the host."""

    slots: Floats
    """Shape [rows, slots]."""
    losses: Floats
    """Shape [rows], NaN without one."""
    clipped: Floats | None = None
    """Norms after a clipping, shape [rows, `CLIP_CHECKS`]; None for shards, of which none are taken."""


class RowBlock:
    """The norms and losses of up to `ROWS` steps on the device, a row for each; one copy brings them to the host."""

    def __init__(self, source: Tensor) -> None:
        """`source`: a row of a buffer, whose present numbers `add` takes."""
        self._source = source
        self._norms = torch.empty((ROWS, len(source)), dtype=source.dtype, device=source.device)
        self._losses = torch.full((ROWS,), torch.nan, dtype=widest_type(source.device), device=source.device)
        self._clipped = torch.full((ROWS, CLIP_CHECKS), torch.nan, dtype=source.dtype, device=source.device)
        on_cpu = source.device.type == "cpu"
        # on the CPU numpy copies a row in a tenth of the time (measured)
        self._views = (source.numpy(), self._norms.numpy(), self._losses.numpy()) if on_cpu else None
        self.count = 0
        """Rows that are filled."""
        self.open = True
        """Whether a row may be added."""
        self.host_copy: HostCopy | None = None
        """What is on its way to the host; no row is added any more."""
        self._numbers: BlockNumbers | None = None
        self._stream: Any = None
        """The stream that wrote the last row."""

    def add(self, loss: Tensor | None) -> tuple[int, bool]:
        """Take the present numbers as a row: its place, and whether `loss` is finite or the host would have to wait for
        the device to know.
        """
        row, self.count = self.count, self.count + 1
        self.open = self.count < ROWS
        if self._views is None:
            self._stream = devices.current_stream(self._source.device, self._stream)
        if loss is not None:
            self._losses[row].copy_(loss.detach(), non_blocking=not self._losses.is_cpu)
        if self._views is None:
            self._norms[row].copy_(self._source)
            return row, True
        source, norms, losses = self._views
        norms[row] = source
        return row, loss is None or isfinite(losses[row])

    def clipped_slots(self, row: int) -> tuple[Tensor, ...]:
        """Where the norms of `CLIP_CHECKS` gradients go after a clipping."""
        return self._clipped[row].unbind()

    def send(self) -> HostCopy:
        """Start the copy to the host; a second call does nothing."""
        if self.host_copy is None:
            self.open = False
            devices.current_stream(self._source.device, self._stream)  # others may ask, in streams of their own
            filled = slice(self.count)
            rows = {"norms": self._norms[filled], "clipped": self._clipped[filled], "losses": self._losses[filled]}
            self.host_copy = HostCopy(rows)
        return self.host_copy

    def wait(self) -> BlockNumbers:
        """Waits for the copy."""
        if self._numbers is None:
            numbers = self.send().wait()
            self._numbers = BlockNumbers(numbers["norms"], numbers["losses"], numbers["clipped"])
        return self._numbers


class HostCopy:
    """Numbers on their way to the host: one copy, started without waiting for the device."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: on one device. They may be written again as soon as this returns."""
        self._numbers: dict[str, Floats] | None = None
        self._copies: dict[str, Tensor] | None = None
        self._landed = True
        if not any(map(devices.is_asynchronous, {*map(attrgetter("device"), tensors.values())})):
            # what else numpy has to do with them can wait until some are opened together (measured: 40 us a step)
            self._copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            return
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._host, self._event = _packed([tensor.detach().reshape(-1) for tensor in tensors.values()])
        self._landed = False

    @property
    def done(self) -> bool:
        if not self._landed:
            # an event that is asked for during a capture ends it
            self._landed = not is_capturing() and self._event.query()
        return self._landed

    def wait(self) -> dict[str, Floats]:
        """The numbers by name, in the shapes that they had; waits for the copy if it has not landed."""
        if self._copies is not None:
            self._numbers = dict(zip(self._copies, map(on_host, self._copies.values()), strict=True))
            self._copies = None
        if self._numbers is None:
            self._event.synchronize()
            self._landed = True
            ends = np.cumsum([shape.numel() for shape in self._shapes.values()])
            parts = np.split(self._host.numpy().astype(np.float64), ends[:-1])
            self._numbers = {
                name: part.reshape(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
            }
        return self._numbers


def _packed(tensors: list[Tensor]) -> tuple[Tensor, torch.Event]:
    """`tensors`, 1-d, one after the other on their way to the host."""
    device = next(tensor.device for tensor in tensors if devices.is_asynchronous(tensor.device))
    # whole numbers up to 2^53 and all floats are exact in float64; a device without it has no such counts
    wide = widest_type(device)
    if all(tensor.dtype is tensors[0].dtype and tensor.is_floating_point() for tensor in tensors):
        wide = tensors[0].dtype if tensors[0].dtype in (torch.float32, torch.float64) else torch.float32
    return devices.start_copy(torch.cat([moved(tensor, device, wide) for tensor in tensors]))


def on_host(tensor: Tensor) -> Floats:
    """The numbers of a tensor as float64, shape kept: a copy, without a scalar read."""
    if tensor.requires_grad or tensor.device.type != "cpu":
        tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:  # which numpy does not know
        tensor = tensor.float()
    host: Floats = tensor.numpy().astype(np.float64)
    return host


def host_view(tensor: Tensor) -> NDArray[Any] | None:
    """The numbers of `tensor` as they are now, where the host can see them without waiting; None on other devices."""
    return tensor.detach().numpy() if tensor.device.type == "cpu" else None
