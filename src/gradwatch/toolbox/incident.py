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

from gradwatch.core.arguments import check_path
from gradwatch.measure.random_states import RngState
from gradwatch.sinks.incident_file import CHECKPOINT_SUFFIX, read_incident


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Incident:
    """An incident that the flight recorder saved; `str()` is the verdict at that time, `repr` too, for notebooks."""

    content: Mapping[str, Any]
    """The whole file, as `torch.load` returns it; docs/report.md describes its keys."""
    path: Path

    def __str__(self) -> str:
        return str(self.content["text"])

    __repr__ = __str__

    @property
    def step(self) -> int:
        """Optimizer steps taken before the failing one."""
        return int(self.content["step"])

    @property
    def batch(self) -> Any:
        """The failing batch, on the CPU; None if it was not saved: `notes` says why."""
        return self.content["batch"]["data"]

    @property
    def notes(self) -> dict[str, str]:
        """Path in the batch -> what was left out or converted there; the path of the whole batch is ''."""
        return dict(self.content["batch"]["notes"])

    @property
    def checkpoint(self) -> str | None:
        """Path of the last healthy checkpoint; None if there was none."""
        pointer, sibling = self.content["checkpoint"], self.path.with_suffix(CHECKPOINT_SUFFIX)
        if pointer and sibling.exists():  # also where the folder has been moved
            return str(sibling)
        return str(pointer["path"]) if pointer else None

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """A context with the random state from the start of the failing step; the present state is restored afterwards.

        Raises ValueError if the state was not saved.
        """
        state = self.content["batch"].get("rng")
        if state is None:
            raise ValueError("the random state was not saved: the training loop did not say where a batch begins")
        with RngState.from_state_dict(state).restored():
            yield

    def replay(self, module: Any) -> Any:
        """The result of `module.training_step(batch, index)` for the failing batch, with its random numbers.

        The module's present weights are used: load those of `checkpoint`, or later ones, to repeat the failing step.
        Raises ValueError if the batch was not saved completely.
        """
        if self.batch is None or self.notes:
            why = "; ".join(f"{path}: {note}" if path else note for path, note in self.notes.items())
            raise ValueError(
                f"the batch was not saved as it was ({why or 'it was None'}): pass one of your own to training_step"
            )
        batch = _batch_on(_device(module), self.batch)
        with self.randomness():
            return module.training_step(batch, self.content["batch"]["index"])


def load_incident(path: str | os.PathLike[str]) -> Incident:
    """Load the incident file at `path`. Raises FileNotFoundError, ValueError for a damaged file or one of another kind,
    and TypeError for an argument that is not a path.
    """
    checked = check_path("load_incident: path", path, "the path of an incident file")
    content = read_incident(checked)
    try:
        if "rng" in content["batch"]:
            RngState.from_state_dict(content["batch"]["rng"]).check()
    except Exception as error:  # generators raise whatever their parts raise
        raise ValueError(f"{checked} is damaged: batch.rng is no random state: {type(error).__name__}") from error
    return Incident(content, checked)


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _batch_on(device: torch.device, batch: Any) -> Any:
    """`batch`, of plain containers, on `device`."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _batch_on(device, value) for key, value in batch.items()}
    return type(batch)(_batch_on(device, item) for item in batch) if isinstance(batch, list | tuple) else batch
