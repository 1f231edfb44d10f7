"""The batch under way, by reference, and where random numbers stood at its begin: what it takes to run it again."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LEVELS, LOOKED_AT = 4, 64
"""How deep, and among how many items of each part of a batch its tensors are looked for. Judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class RngState:
    """Where every source of random numbers stood; `state_dict` loads with `torch.load(weights_only=True)`."""

    cpu: Tensor
    """Of torch on the CPU, uint8."""
    devices: Mapping[str, Tensor]
    """Of each CUDA device in use, by its name ("cuda:0"), uint8, on the CPU."""
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    """Empty where NumPy's global generator is not of its usual kind."""

    @classmethod
    def now(cls, devices: Sequence[torch.device] = ()) -> RngState:
        """As it is; `devices`: those in use, of which CUDA's count. Waits for none of them."""
        there = {str(device): torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}
        return cls(torch.get_rng_state(), there, _python_state(), _numpy_state())

    def put(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy:
            np.random.set_state(self.numpy)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Back to this state, and at the end, come what may, to that of before."""
        before = RngState.now([torch.device(device) for device in self.devices])
        try:
            self.put()
            yield
        finally:
            before.put()

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text only."""
        version, words, gauss = self.python
        numpy: dict[str, Any] = {}
        if self.numpy:
            kind, key, place, has_gauss, cached = self.numpy
            numpy = {
                "kind": str(kind),
                "words": torch.from_numpy(key.astype(np.int64)),
                "place": int(place),
                "has_gauss": int(has_gauss),
                "gauss": float(cached),
            }
        return {
            "cpu": self.cpu.clone(),
            "devices": {device: state.clone() for device, state in self.devices.items()},
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": numpy,
        }

    @classmethod
    def of_state_dict(cls, state: Mapping[str, Any]) -> RngState:
        """Raises LookupError, TypeError or ValueError for what `state_dict` did not make."""
        python, numpy = state["python"], state["numpy"]
        words = tuple(python["words"].tolist())
        theirs: tuple[Any, ...] = ()
        if numpy:
            key = np.array(numpy["words"].tolist(), dtype=np.uint32)
            theirs = numpy["kind"], key, numpy["place"], numpy["has_gauss"], numpy["gauss"]
        ours = python["version"], words, python["gauss"]
        return cls(state["cpu"], dict(state["devices"]), ours, theirs)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch that a training step works on; no copy of it, so let go of it when the step is over."""

    index: int
    """In its epoch, from 0."""
    epoch: int
    data: Any
    rng: RngState
    """At its begin, before anything of the step ran."""
    versions: tuple[int, ...] = ()
    """How often each tensor had been changed in place by then."""

    @classmethod
    def begun(cls, data: Any, index: int, *, epoch: int = 0, devices: Sequence[torch.device] = ()) -> Batch:
        """The batch whose step begins now; `devices`: those of the model."""
        return cls(index, epoch, data, RngState.now(devices), _versions(data))

    @property
    def unchanged(self) -> bool:
        """Whether its tensors are still what they were, as far as they can be found."""
        return self.versions == _versions(self.data)


def devices_of(model: nn.Module) -> tuple[torch.device, ...]:
    """The devices on which `model` has parameters or buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return tuple(dict.fromkeys(tensor.device for tensor in tensors))


def tensors_of(data: object, path: str = "", levels: int = LEVELS) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with their places in it ('[0]', "['image']"), as far as `LEVELS` and `LOOKED_AT` go."""
    if isinstance(data, Tensor):
        yield path, data
        return
    if not levels:
        return
    parts: Iterator[tuple[str, object]] = iter(())
    if isinstance(data, Mapping):
        parts = ((f"[{key!r}]", item) for key, item in data.items())
    elif isinstance(data, list | tuple):
        parts = ((f"[{i}]", item) for i, item in enumerate(data))
    elif dataclasses.is_dataclass(data):
        parts = ((f".{field.name}", getattr(data, field.name, None)) for field in dataclasses.fields(data))
    for name, item in islice(parts, LOOKED_AT):
        yield from tensors_of(item, path + name, levels - 1)


def _versions(data: object) -> tuple[int, ...]:
    try:
        # the usual batch is a list of tensors: to look deeper takes four times as long, at every step (measured)
        flat = isinstance(data, list | tuple) and len(data) <= LOOKED_AT and all(type(it) is Tensor for it in data)
        tensors: Iterable[Tensor] = data if flat else [tensor for _, tensor in tensors_of(data)]  # type: ignore[assignment]
        return tuple([-1 if tensor.is_inference() else tensor._version for tensor in tensors])
    except Exception:  # a batch may be an object of the user's own making
        return ()


class _Words:
    """A state of 624 words and the place among them, which takes 25 to 100 microseconds to ask for, and 2
    to look at in memory: asked for again where it has changed there.
    """

    def __init__(self, ask: Callable[[], tuple[Any, ...]], address: int) -> None:
        """`address`: where they lie, 4 bytes each; 0 where that is not known."""
        self._ask, self._address = ask, address
        self._words, self._state = b"", ()

    def state(self) -> tuple[Any, ...]:
        if not self._address:
            return self._ask()
        words = ctypes.string_at(self._address, 625 * 4)
        if words != self._words:
            self._words, self._state = words, self._ask()
        return self._state


_python: _Words | None = None

_numpy: tuple[object, _Words] = (None, _Words(tuple, 0))
"""NumPy's global generator, and its words."""


def _python_state() -> tuple[Any, ...]:
    """What `random.getstate()` gives."""
    global _python
    source = getattr(random.getstate, "__self__", None)
    if not isinstance(source, random.Random):
        return random.getstate()
    _python = _python or _Words(random.getstate, _place_of(source))
    version, words, _ = _python.state()
    return version, words, source.gauss_next  # type: ignore[attr-defined] # it changes no word


def _place_of(source: random.Random) -> int:
    """Where its place among its words and they lie in memory: where they are found in that of the object. 0 for not
    at all.
    """
    if sys.implementation.name != "cpython":
        return 0  # only there an id is an address
    *words, place = source.getstate()[1]
    at = ctypes.string_at(id(source), type(source).__basicsize__).find(array("I", [place, *words]).tobytes())
    return id(source) + at if at >= 0 else 0


def _numpy_state() -> tuple[Any, ...]:
    """The state of NumPy's global generator, empty where it is of another kind than NumPy's own.

    A second half of a pair of normal numbers, which changes no word, goes unnoticed.
    """
    global _numpy
    source = np.random.get_bit_generator()  # type: ignore[attr-defined] # public, but not in its stubs
    if source is not _numpy[0]:
        known = type(source).__name__ == "MT19937"
        _numpy = source, _Words(_asked_of_numpy if known else tuple, source.ctypes.state_address if known else 0)
    return _numpy[1].state()


def _asked_of_numpy() -> tuple[Any, ...]:
    return tuple(np.random.get_state(legacy=True))
