"""Trainings over several ranks that average their gradients: what is true at every step, faults on one rank."""

from __future__ import annotations

import copy
import logging
import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ranks
from gradwatch import GradWatch
from gradwatch.sinks.log import Log
from gradwatch.sinks.memory import Memory
from reference import bits, gradient_norms, hooks_on, square
from training import quiet_trainer

BATCHES = 10
"""On each rank."""
WHEN = 4
"""The batch of the odd things below."""
SHARED = ("grad_norm", "grad_norm_clipped", "zero_fraction", "weight_norm", "update_ratio")
"""Statistics that every rank has alike; signals are its own."""


class PlannedError(RuntimeError):
    pass


class SeededModule(pl.LightningModule):
    """A small net that stores its own gradient norms at every step; every rank and batch has inputs of its own."""

    def __init__(
        self,
        *,
        unused: bool = False,
        norm: bool = False,
        manual: bool = False,
        local: bool = False,
        odd: tuple[str, int] = ("", -1),
    ) -> None:
        """`odd`: what happens in batch `WHEN`, and on which rank."""
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(150) if norm else nn.Tanh()
        self.model = nn.Sequential(nn.Linear(6, 150), middle, nn.Linear(150, 150), nn.Tanh(), nn.Linear(150, 1))
        if unused:
            self.nowhere = nn.Linear(3, 3)
            self.on_rank_0 = nn.Linear(1, 1)
        self.automatic_optimization = not manual
        self.unused, self.local, self.odd = unused, local, odd
        self.before: list[dict[str, float]] = []
        self.after: list[dict[str, float]] = []
        self.own: list[float] = []
        self.batches = 0

    def loss(self, model: nn.Module, seed: int, *, odd: str = "") -> Tensor:
        hidden = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        for place, layer in enumerate(model.children()):
            hidden = layer(hidden)
            if odd == "backward" and place == 2:
                hidden.register_hook(lambda gradient: gradient * float("nan"))
        if self.unused and self.global_rank == 0:
            hidden = self.on_rank_0(hidden)
        loss = (hidden.float() - 0.5).square().mean()
        return loss * float("nan") if odd == "loss" else loss + 1000.0 * (odd == "high")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.batches += 1
        odd = self.odd[0] if (batch_idx, self.global_rank) == (WHEN, self.odd[1]) else ""
        if odd == "raise":
            raise PlannedError
        if odd == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        seed = int(batch)
        if self.local:
            duplicate = copy.deepcopy(self.model)
            gradients = torch.autograd.grad(self.loss(duplicate, seed), list(duplicate.parameters()))
            self.own.append(sum(map(square, gradients)) ** 0.5)
        if self.automatic_optimization:
            return self.loss(self.model, seed, odd=odd)
        first, second = self.optimizers()
        for optimizer in (first, second) if batch_idx % 2 else (first,):
            optimizer.zero_grad()
            self.manual_backward(self.loss(self.model, seed))
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before.append(gradient_norms(self, optimizer))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.after.append(gradient_norms(self, optimizer))

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        if self.automatic_optimization:
            return torch.optim.AdamW(parameters, lr=1e-3)
        return torch.optim.AdamW(parameters[:3], lr=1e-3), torch.optim.SGD(parameters[3:], lr=1e-2)


def fit_on_ranks(
    module: SeededModule, *callbacks: Any, ddp: dict[str, Any] | None = None, fp16: int = 0, **more: Any
) -> Any:
    """`fp16`: the first loss scale, 0 for none."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if fp16:
        more["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=float(fp16)))]
    more.setdefault("strategy", DDPStrategy(process_group_backend="gloo", **(ddp or {})))
    trainer = quiet_trainer(*callbacks, devices=ranks.SIZE, **more)
    trainer.fit(module, DataLoader(torch.arange(ranks.SIZE * BATCHES), batch_size=1))  # type: ignore[arg-type]
    return trainer


class Lines(logging.Handler):
    """What the log says, from INFO on."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self.all: list[str] = []
        logger = logging.getLogger("gradwatch")
        logger.handlers, logger.level, logger.propagate = [self], logging.INFO, False

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record.getMessage())
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())


def numbers_of(watch: GradWatch) -> list[dict[str, Any]]:
    """Every record as plain data: statistic -> site -> number, and what else it says."""
    plain = []
    for record in (watch.history[i] for i in range(len(watch.history))):
        sites = [site.name for site in record.layout.sites]
        values = {name: dict(zip(sites, record.values[name].tolist(), strict=True)) for name in SHARED}
        about = {"step": record.step, "optimizer": record.optimizer, "missing": record.missing}
        plain.append({**about, "values": values, "scalars": dict(record.scalars)})
    return plain


def trained(module: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Two fits, watched and alone."""
    lines, memory = Lines(), Memory()
    watch, watched, alone = GradWatch(sinks=(memory, Log())), SeededModule(**module), SeededModule(**module)
    trainer, other = fit_on_ranks(watched, watch, **options), fit_on_ranks(alone, **options)
    return {
        "records": numbers_of(watch),
        "steps": trainer.global_step,
        "reported": len(memory.records),
        "lines": lines.all,
        "warnings": lines.warnings,
        "label": memory.run and memory.run.labels["grad_norm"],
        "before": watched.before,
        "after": watched.after,
        "own": watched.own,
        "bits": (bits(watched), bits(alone)),
        "hooks": (hooks_on(watched, *trainer.optimizers), hooks_on(alone, *other.optimizers)),
    }


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"local": True}, {}),
    "unused": ({"unused": True}, {"ddp": {"find_unused_parameters": True}}),
    "static graph": ({}, {"ddp": {"static_graph": True}}),
    "bucket views": ({}, {"ddp": {"gradient_as_bucket_view": True}}),
    "bucket views, accumulated": ({}, {"ddp": {"gradient_as_bucket_view": True}, "accumulate_grad_batches": 3}),
    "accumulated": ({"local": True}, {"accumulate_grad_batches": 4}),
    "clipped": ({}, {"gradient_clip_val": 0.05}),
    "clipped by value": ({}, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
    "fp16": ({}, {"fp16": 2**10, "gradient_clip_val": 0.05, "accumulate_grad_batches": 3}),
    "bf16": ({}, {"precision": "bf16-mixed", "gradient_clip_val": 0.05}),
    "by hand": ({"manual": True}, {}),
    "batch norm": ({"norm": True}, {}),
}
