"""Loads a saved incident and runs its batch again, in a debugger for example."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.measure.batch import RngState
from gradwatch.sinks.incident_file import CHECKPOINT, read


@dataclass(frozen=True, slots=True, eq=False)
class Incident:
    """What the flight recorder saved; `str()` is the verdict at that time."""

    content: Mapping[str, Any]
    """All of it, as `torch.load` gives it; docs/incidents.md says what is where."""
    path: Path

    def __str__(self) -> str:
        return str(self.content["text"])

    @property
    def step(self) -> int:
        """Optimizer steps taken before the failing one."""
        return int(self.content["step"])

    @property
    def batch(self) -> Any:
        """The failing batch, on the CPU; None where it was not kept, `notes` say why."""
        return self.content["batch"]["data"]

    @property
    def notes(self) -> dict[str, str]:
        """Place in the batch -> what was left out there, or became something else; the whole batch is at ''."""
        return dict(self.content["batch"]["notes"])

    @property
    def checkpoint(self) -> str | None:
        """Path of the last checkpoint from before anything was wrong; None where none was known."""
        pointer, beside = self.content["checkpoint"], self.path.with_suffix(CHECKPOINT)
        if pointer and beside.exists():  # also where the folder has been moved
            return str(beside)
        return str(pointer["path"]) if pointer else None

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """Inside, random numbers are those of the failing step from its beginning; afterwards the state is restored.

        Raises ValueError where their state was not kept.
        """
        state = self.content["batch"].get("rng")
        if state is None:
            raise ValueError("the state of the random numbers was not kept: the loop did not tell where a batch begins")
        with RngState.of_state_dict(state).restored():
            yield

    def replay(self, module: Any) -> Any:
        """What `module.training_step(batch, index)` gives for the failing batch, with the random numbers it had then.

        The module's weights are those it has: for the very step load those of `checkpoint`, or of later. Raises
        ValueError where the batch was not kept, or not as it was.
        """
        if self.batch is None or self.notes:
            why = "; ".join(f"{place or 'the batch'}: {note}" for place, note in self.notes.items())
            raise ValueError(f"the batch is not here as it was: {why or 'it was None'}. Give your own to training_step")
        batch = _moved(self.batch, _device(module))
        with self.randomness():
            return module.training_step(batch, self.content["batch"]["index"])


def load_incident(path: str | os.PathLike[str]) -> Incident:
    """Read what the flight recorder wrote. Raises FileNotFoundError, or ValueError for a foreign or damaged file."""
    return Incident(read(path), Path(path))


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _moved(batch: Any, device: torch.device) -> Any:
    """`batch`, which is of plain containers, on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _moved(value, device) for key, value in batch.items()}
    return type(batch)(_moved(item, device) for item in batch) if isinstance(batch, list | tuple) else batch
