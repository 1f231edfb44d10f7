"""What GradWatch knows of a training loop: the mode, which decides what a gradient norm means, and its batches and
settings at an incident.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

LoopKind = Literal["automatic", "manual", "own"]
"""Who takes the optimizer's steps: Lightning, a LightningModule in manual optimization, or a loop of the user's own."""

TrainingState = Literal["running", "suspended", "over"]
"""Suspended: the model is trained on something else for a while, as in a search for a learning rate."""


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """The settings of a training loop that decide what a measured gradient is."""

    accumulate: int = 1
    """Micro-batches per optimizer step, N; the most of them where a schedule changes it."""
    accumulate_scheduled: bool = False
    """Whether a schedule changes `accumulate` from epoch to epoch."""
    ranks: int = 1
    """Processes, W."""
    averaged: int | None = None
    """How many of them have batches of their own and average their gradients; None for all. Tensor parallelism has
    fewer.
    """
    rank: int = 0
    """Number of this process among them, from 0."""
    scaled: bool = False
    """Whether the gradients carry a loss scale during the backward pass."""
    clipping: str = ""
    """The clipping after the measurement, as text; empty if none is known."""
    clips: bool = False
    """Whether it is known to clip; what the model does in place of the Trainer is not known."""
    clip_norm: float | None = None
    """The limit of a clipping of all gradients by their common norm, as `torch.nn.utils.clip_grad_norm_` does it."""
    monitored: bool = False
    """Whether another callback, such as EarlyStopping, reads GradWatch's numbers during the training."""
    loop: LoopKind = "own"
    """In automatic optimization the loop reports to which optimizer step each backward pass belongs."""

    @property
    def rank_text(self) -> str:
        """' on rank 1'; empty with one process."""
        return f" on rank {self.rank}" if self.ranks > 1 else ""

    def label(self, *, sharded: bool, acting: bool) -> str:
        """What a gradient norm of this run means, as text. `acting`: whether interventions follow the measurement."""
        averaged = self.ranks if self.averaged is None else self.averaged
        later = ["interventions"] * acting + [f"clipping ({self.clipping})"] * bool(self.clipping)
        parts = [
            f"accumulated {'up to ' * self.accumulate_scheduled}x{self.accumulate}" if self.accumulate > 1 else "",
            "unscaled" if self.scaled else "",
            f"mean over {averaged} ranks" if averaged > 1 else "",
            "summed over shards" if sharded else "",
            f"before {' and '.join(later)}" if later else "as the optimizer first receives them",
        ]
        return ", ".join(part for part in parts if part)


class TrainingLoop(Protocol):
    """The parts of a training loop that an incident file needs."""

    folder: str | None
    """The folder of its logger; None where there is none, and no files are expected."""
    rank: int
    """Number of this process, from 0."""

    def batch(self, index: int, epoch: int, *, data: bool) -> Mapping[str, Any] | None:
        """The batch of that index and epoch as plain data, if it is the present one or recent; None otherwise.

        `index`, `epoch`, `rng` (the states of the random number generators at its start), `data` (the batch itself,
        None unless asked for), and `notes`: path in the batch -> what was left out or converted there.
        """

    def settings(self) -> Mapping[str, Any]:
        """Its settings and progress, as plain data."""

    def checkpoint(self, unhealthy: Callable[[int], bool]) -> tuple[str, int] | None:
        """Path and optimizer steps of the last checkpoint whose steps are not `unhealthy`; None without one."""
