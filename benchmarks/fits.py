"""Whole fits: the CPU time of a training in a Trainer, with a watcher and without one, in turns."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from time import process_time
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.paired import Floats
from benchmarks.workloads import GPT, ResidualNet, loss, normed

Watchers = Callable[[], Sequence[Callback]]
"""Makes the callbacks of one fit."""


@dataclass(frozen=True, slots=True)
class FitWorkload:
    """A training as a user of Lightning writes it."""

    name: str
    module: Callable[[], LightningModule]
    batches: Callable[[], Sequence[Any] | None]
    """A list that is repeated; None where the module has its own."""
    steps: int
    turns: int
    """Fits with each watcher."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the Trainer."""


class Training(LightningModule):
    def __init__(self, model: nn.Module, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.model, self._learning_rate = model, learning_rate

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self._learning_rate)


class Unsteady(Training):
    """Its loss jumps up and down, as where single examples or rewards make it."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (30.0 if batch_idx % 2 else 1.0)


class PartlyUsed(Training):
    """It has a layer that no batch reaches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.unused = nn.Linear(64, 64)


def _training(
    build: Callable[[], nn.Module], kind: Callable[[nn.Module], LightningModule] = Training
) -> Callable[[], LightningModule]:
    def make() -> LightningModule:
        torch.manual_seed(0)
        return kind(build())

    return make


def _pairs(width: int) -> Callable[[], list[tuple[Tensor, Tensor]]]:
    """Fifty batches whose classes can be learnt."""

    def make() -> list[tuple[Tensor, Tensor]]:
        inputs = torch.randn(50, 64, width, generator=torch.Generator().manual_seed(1))
        return [(batch, batch[:, :10].argmax(1)) for batch in inputs]

    return make


def _tokens() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(512, (20, 4, 65), generator=torch.Generator().manual_seed(1))
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


FIT_WORKLOADS = {
    workload.name: workload
    for workload in (
        FitWorkload("boring", BoringModel, lambda: None, 20, 15),
        FitWorkload("small", _training(lambda: normed(5, 64)), _pairs(64), 600, 7),
        FitWorkload("mlp", _training(lambda: normed(50, 256)), _pairs(256), 300, 3),
        FitWorkload("gpt", _training(GPT), _tokens, 60, 3),
        FitWorkload("residual", _training(ResidualNet), _pairs(32), 100, 3),
    )
}

SHORT = replace(FIT_WORKLOADS["small"], steps=200, turns=5)
"""The small model, which is trained in several ways."""

FIT_WAYS = {
    "`GradWatch()`, 200 steps": SHORT,
    "a checkpoint after each step": replace(
        SHORT, batches=lambda: _pairs(64)()[:1], options={"enable_checkpointing": True}
    ),
    "four micro-batches a step": replace(SHORT, options={"accumulate_grad_batches": 4}),
    "a loss that jumps up and down": replace(SHORT, module=_training(lambda: normed(5, 64), Unsteady)),
    "a layer that is not used": replace(SHORT, module=_training(lambda: normed(5, 64), PartlyUsed)),
}
"""What is done -> the training."""


class BareNorms(Callback):
    """One `torch._foreach_norm` at each step, into a row of a buffer: the least that a watcher does."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._parameters = list(pl_module.parameters())
        self._rows = list(torch.zeros(64, len(self._parameters)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        norms = torch._foreach_norm([parameter.grad for parameter in self._parameters])
        torch.stack(norms, out=self._rows[trainer.global_step % len(self._rows)])


class LoggedGradNorm(Callback):
    """`self.log_dict(grad_norm(self, norm_type=2))`: the recipe in Lightning's documentation."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        pl_module.log_dict(grad_norm(pl_module, norm_type=2))


def fit_seconds(workload: FitWorkload, watchers: Sequence[Callback], *, log_every: int = 50) -> float:
    """CPU seconds of `Trainer.fit`, from its call to its return, in all threads."""
    batches = workload.batches()
    loader = () if batches is None else (DataLoader(batches, batch_size=None),)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder, _quiet():
        options: dict[str, Any] = {
            "accelerator": "cpu",
            "max_steps": workload.steps,
            "max_epochs": -1,
            "limit_val_batches": 0,
            "log_every_n_steps": log_every,
            "logger": TensorBoardLogger(folder),
            "callbacks": list(watchers),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
        }
        trainer = Trainer(**{**options, **workload.options})
        module = workload.module()
        begun = process_time()
        trainer.fit(module, *loader)
        return process_time() - begun


def compare_fits(
    workload: FitWorkload, watchers: Mapping[str, Watchers], *, turns: int = 0, log_every: int = 50
) -> dict[str, Floats]:
    """CPU seconds of each fit, shape [turns]: bare ones ("bare") and those with each of `watchers`, in turns.

    `turns`: 0 for the workload's own.
    """
    subjects: dict[str, Watchers] = {"bare": tuple, **watchers}
    for make in subjects.values():  # what is imported at first use is no part of a fit
        fit_seconds(workload, make(), log_every=log_every)
    taken: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(turns or workload.turns):
        for name, make in subjects.items():
            taken[name].append(fit_seconds(workload, make(), log_every=log_every))
    return {name: np.array(seconds) for name, seconds in taken.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on the screen but our tables."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "gradwatch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
