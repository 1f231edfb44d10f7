"""Trainings of a model whose parameters are DTensors (FSDP2, HSDP, tensor parallelism): what is true at every step."""

from __future__ import annotations

import logging
import math
import os
import re
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from ddp_training import Lines
from gradwatch import GradWatch
from gradwatch.sinks.log import Log
from gradwatch.sinks.memory import Memory
from reference import dense, hooks_on, names, per_site, square
from training import quiet_trainer

BATCHES = 8
UNHEALTHY = 6
"""The batch whose loss may be NaN."""
STATISTICS = ("grad_norm", "grad_norm_clipped", "weight_norm", "zero_fraction", "update_ratio")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every rank has to ask."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def bytes_of(module: nn.Module) -> dict[str, bytes]:
    return {name: whole(parameter).numpy().tobytes() for name, parameter in module.named_parameters()}


def norms(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, float]:
    sums = per_site(model, {name: square(tensor) for name, tensor in tensors.items()})
    return {site: total**0.5 for site, total in sums.items()}


class ShardedModule(pl.LightningModule):
    """A small net of awkward sizes: rows that two ranks share unevenly, a bias whose one element one rank has."""

    def __init__(
        self,
        *,
        parallel: str = "layers",
        clip: float | None = None,
        odd: tuple[str, int] = ("", -1),
        known: float = math.inf,
        every: int = 1,
    ) -> None:
        """`odd`: what happens in batch `UNHEALTHY`, and on which rank. `known`, `every`: it finds out what is true at
        every so many of the first `known` steps, which takes far longer than the step.
        """
        super().__init__()
        self.known, self.every, self.steps = known, every, 0
        self.parallel, self.clip, self.odd = parallel, clip, odd
        self.truths: list[dict[str, dict[str, float]]] = []

    def configure_model(self) -> None:
        torch.manual_seed(0)
        width = 8 if self.parallel == "tensor" else 7
        self.model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 201), nn.Tanh(), nn.Linear(201, 1))
        if self.parallel == "tensor":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)
        else:
            # HSDP: copies along the first dimension, parts along the second
            mesh = self.device_mesh if self.parallel == "hybrid" else self.device_mesh["data_parallel"]
            for layer in (self.model[0], self.model[2], self.model[4]) if self.parallel != "root" else ():
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # the ranks of tensor parallelism work on the same batch
        seed = batch_idx if self.parallel == "tensor" else int(batch)
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        loss = (self.model(inputs) - 0.5).square().mean()
        unhealthy = batch_idx == UNHEALTHY and self.global_rank == self.odd[1]
        return loss * float("nan") if unhealthy and self.odd[0] == "nan" else loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: whole(p.grad) for name, (_, p) in names(self).items() if p.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(p).clone() for name, (_, p) in names(self).items()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.finds_out = self.steps < self.known and self.steps % self.every == 0
        self.steps += 1
        if not self.finds_out:
            return
        gradients, self.old = self.gradients(), self.new if self.truths and self.every == 1 else self.weights()
        zeros = per_site(self, {name: float((dense(g) == 0).sum()) for name, g in gradients.items()})
        sizes = per_site(self, {name: float(g.numel()) for name, g in gradients.items()})
        shares = {site: zeros[site] / sizes[site] for site in zeros}
        grad_norm, weight_norm = norms(gradients, self), norms(self.old, self)
        self.truths.append({"grad_norm": grad_norm, "weight_norm": weight_norm, "zero_fraction": shares})

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.model.parameters()), self.clip)
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        if self.finds_out:
            clips = self.clip is not None or self.trainer.gradient_clip_val is not None
            truth = self.truths[-1]
            truth["grad_norm_clipped"] = norms(self.gradients(), self) if clips else truth["grad_norm"]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.truths and "update_ratio" not in self.truths[-1]:
            self.new = self.weights()
            moved = norms({name: new - self.old[name] for name, new in self.new.items()}, self)
            base = self.truths[-1]["weight_norm"]
            self.truths[-1]["update_ratio"] = {site: moved[site] / base[site] for site in moved}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


# ---- what runs on every rank


def fit_sharded(module: ShardedModule, *callbacks: Any, batches: int = BATCHES, **more: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size = int(os.environ["WORLD_SIZE"])
    shape = {"tensor": (1, size), "hybrid": (2, size // 2)}.get(module.parallel, (size, 1))
    trainer = quiet_trainer(
        *callbacks, devices=size, strategy=ModelParallelStrategy(*shape, process_group_backend="gloo"), **more
    )
    trainer.fit(module, DataLoader(torch.arange(shape[0] * batches), batch_size=1))  # type: ignore[arg-type]
    return trainer


def hooks_of(module: ShardedModule, trainer: Any) -> list[str]:
    """In words that do not depend on where in memory FSDP's own hooks lie."""
    return [re.sub("0x[0-9a-f]+", "", hook) for hook in hooks_on(module, *trainer.optimizers)]


class Reductions:
    """Counts the all-reduces that are asked for through torch's public function."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Reductions:
        self._original = distributed.all_reduce
        distributed.all_reduce = self._counted
        return self

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._original(*args, **kwargs)

    def __exit__(self, *_: object) -> None:
        distributed.all_reduce = self._original


def trained(module: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Two fits, watched and alone."""
    lines, memory = Lines(), Memory()
    watch = GradWatch(sinks=(memory, Log()))
    watched, alone = ShardedModule(**module), ShardedModule(**module, known=0)
    with Reductions() as ours:
        trainer = fit_sharded(watched, watch, **options)
    with Reductions() as theirs:
        other = fit_sharded(alone, **options)
    history = watch.history
    sites = [site.name for site in history.layout.sites]
    return {
        "records": [
            {name: dict(zip(sites, numbers.tolist(), strict=True)) for name, numbers in history[i].values.items()}
            for i in range(len(history))
        ],
        "accumulated": [history[i].scalars.get("accumulated") for i in range(len(history))],
        "truths": watched.truths,
        "reported": len(memory.records),
        "lines": lines.all,
        "warnings": lines.warnings,
        "notes": watch.verdict.notes,
        "bits": (bytes_of(watched), bytes_of(alone)),
        "hooks": (hooks_of(watched, trainer), hooks_of(alone, other)),
        "reduced": ours.count - theirs.count,
    }


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer by layer": ({}, {}),
    "all in one": ({"parallel": "root"}, {}),
    "clipped": ({"clip": 0.01}, {}),
    "clipped by the Trainer": ({}, {"gradient_clip_val": 0.01}),
    "accumulated": ({}, {"accumulate_grad_batches": 3}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "tensor parallel": ({"parallel": "tensor"}, {}),
    "hybrid": ({"parallel": "hybrid", "clip": 0.01}, {}),
}
RANKS = {"hybrid": 4}
"""Of a variant that shows more on more than two, in the table of modes: copies of parts, not just copies."""
