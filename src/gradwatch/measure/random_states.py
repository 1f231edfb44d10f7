"""The states of the random number generators before a batch, which a replay begins with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

FIRST_BATCHES, BATCHES_APART = 8, 64
"""The states of Python's and NumPy's generators are read before each of the first batches, then before one in so many.
Judgement: reading them takes 30 and 180 us, reading torch's takes 2 us (measured)."""


@dataclass(slots=True, eq=False)
class RngState:
    """The states of all random number generators; `state_dict` loads with `torch.load(weights_only=True)`."""

    cpu: Tensor
    """Of torch on the CPU, uint8."""
    devices: Mapping[str, Tensor]
    """Of CUDA devices, by their names ("cuda:0"), uint8, on the CPU."""
    python: tuple[Any, ...]
    """As `random.getstate()` gives it."""
    numpy: tuple[Any, ...]
    """As `numpy.random.get_state()` gives it; empty where NumPy's global generator is not an MT19937."""

    @classmethod
    def now(cls, devices: Sequence[torch.device] = ()) -> RngState:
        """The present states; `devices`: the CUDA devices in use. Does not wait for them."""
        return cls(torch.get_rng_state(), _cuda_states(devices), random.getstate(), _numpy_state())

    def set(self) -> None:
        """Set all generators to these states."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy:
            np.random.set_state(self.numpy)

    def check(self) -> None:
        """Raises, of whatever type, where the generators would not take these states. Changes none of them."""
        torch.Generator().set_state(self.cpu)
        random.Random().setstate(self.python)
        if self.numpy:
            if not 0 <= self.numpy[2] <= 624:  # NumPy takes any, and reads beyond its 624 words
                raise ValueError(f"place {self.numpy[2]} among 624 words")
            np.random.RandomState().set_state(self.numpy)
        for device in self.devices:
            if torch.device(device).type != "cuda":
                raise ValueError(f"{device} is no CUDA device")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context that starts with these states and restores the previous ones when it ends, also with an error."""
        before = RngState.now([torch.device(device) for device in self.devices])
        try:
            self.set()
            yield
        finally:
            before.set()

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text only."""
        version, words, gauss = self.python
        numpy: dict[str, Any] = {}
        if self.numpy:
            kind, key, position, has_gauss, cached = self.numpy
            numpy = {
                "kind": str(kind),
                "words": torch.from_numpy(key.astype(np.int64)),
                "place": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(cached),
            }
        return {
            "cpu": self.cpu.clone(),
            "devices": {device: state.clone() for device, state in self.devices.items()},
            "python": {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
                "gauss": gauss,
            },
            "numpy": numpy,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RngState:
        """Raises LookupError, TypeError or ValueError for a dict that `state_dict` did not make."""
        python, numpy = state["python"], state["numpy"]
        words = tuple(python["words"].tolist())
        numpy_state: tuple[Any, ...] = ()
        if numpy:
            key = np.array(numpy["words"].tolist(), dtype=np.uint32)
            numpy_state = numpy["kind"], key, numpy["place"], numpy["has_gauss"], numpy["gauss"]
        python_state = python["version"], words, python["gauss"]
        return cls(state["cpu"], dict(state["devices"]), python_state, numpy_state)


class BatchRngStates:
    """Reads the states of the random number generators before each batch.

    Most trainings never draw from Python's and NumPy's global generators. Their states are read before the first
    `FIRST_BATCHES` batches and before every `BATCHES_APART`-th one; after a change in between, before every batch.
    """

    def __init__(self) -> None:
        self._batches = 0
        self._host_generators_used = False
        self._latest: RngState | None = None

    def before_batch(self, devices: Sequence[torch.device] = ()) -> RngState:
        """The states at the start of a batch; `devices` as in `RngState.now`."""
        number, latest = self._batches, self._latest
        self._batches += 1
        if latest is not None and not self._host_generators_used and number >= FIRST_BATCHES and number % BATCHES_APART:
            on_devices = _cuda_states(devices) if devices else {}
            return RngState(torch.get_rng_state(), on_devices, latest.python, latest.numpy)
        state = RngState.now(devices)
        if latest is not None:
            self._host_generators_used |= state.python != latest.python or not _equal(state.numpy, latest.numpy)
        self._latest = state
        return state


def _numpy_state() -> tuple[Any, ...]:
    """The state of NumPy's global generator; empty where it is not an MT19937."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # public, but not in its stubs
    return tuple(np.random.get_state(legacy=True)) if type(generator).__name__ == "MT19937" else ()


def _cuda_states(devices: Sequence[torch.device]) -> dict[str, Tensor]:
    return {str(device): torch.cuda.get_rng_state(device) for device in devices}


def _equal(state: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(state) == len(other) and all(map(np.array_equal, state, other))
