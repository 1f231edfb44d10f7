"""Parameters that lie in parts on two ranks (FSDP2, tensor parallelism): the numbers are those of the whole."""

from __future__ import annotations

import logging
import math
import os
import re
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

import ranks
from gradwatch import GradWatch
from gradwatch.core.alert import AlertRaised
from gradwatch.core.schedule import FIRST_STEPS
from gradwatch.sinks.log import Log
from gradwatch.sinks.memory import Memory
from on_each_rank import Lines, PlannedError
from oracle import dense, hooks_on, names, per_site, square

BATCHES = 8
SICK = 6
STATISTICS = ("grad_norm", "grad_norm_clipped", "weight_norm", "zero_fraction", "update_ratio")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every rank has to ask."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def norms(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, float]:
    sums = per_site(model, {name: square(tensor) for name, tensor in tensors.items()})
    return {site: total**0.5 for site, total in sums.items()}


class Lit(pl.LightningModule):
    """A small net of awkward sizes: rows that two ranks share unevenly, a bias whose one element one rank has."""

    def __init__(self, *, parallel: str = "layers", clip: float | None = None, odd: tuple[str, int] = ("", -1)) -> None:
        """`odd`: what happens in batch `SICK`, and on which rank."""
        super().__init__()
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
        sick = batch_idx == SICK and self.global_rank == self.odd[1]
        return loss * float("nan") if sick and self.odd[0] == "nan" else loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: whole(p.grad) for name, (_, p) in names(self).items() if p.grad is not None}

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(p).clone() for name, (_, p) in names(self).items()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients, self.old = self.gradients(), self.weights()
        zeros = per_site(self, {name: float((dense(g) == 0).sum()) for name, g in gradients.items()})
        sizes = per_site(self, {name: float(g.numel()) for name, g in gradients.items()})
        shares = {site: zeros[site] / sizes[site] for site in zeros}
        grad_norm, weight_norm = norms(gradients, self), norms(self.old, self)
        self.truths.append({"grad_norm": grad_norm, "weight_norm": weight_norm, "zero_fraction": shares})

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.model.parameters()), self.clip)
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.truths[-1]["grad_norm_clipped"] = norms(self.gradients(), self)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.truths and "update_ratio" not in self.truths[-1]:
            moved = norms({name: new - self.old[name] for name, new in self.weights().items()}, self)
            base = self.truths[-1]["weight_norm"]
            self.truths[-1]["update_ratio"] = {site: moved[site] / base[site] for site in moved}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


# ---- what runs on every rank


def fit(module: Lit, *callbacks: Any, **more: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size = int(os.environ["WORLD_SIZE"])
    shape = {"tensor": (1, size), "hybrid": (2, size // 2)}.get(module.parallel, (size, 1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=ModelParallelStrategy(*shape, process_group_backend="gloo"),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"logger": False, "max_epochs": 1, **more},
    )
    trainer.fit(module, DataLoader(torch.arange(shape[0] * BATCHES), batch_size=1))  # type: ignore[arg-type]
    return trainer


def hooks_of(module: Lit, trainer: Any) -> list[str]:
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
    watch, watched, alone = GradWatch(sinks=(memory, Log())), Lit(**module), Lit(**module)
    with Reductions() as ours:
        trainer = fit(watched, watch, **options)
    with Reductions() as theirs:
        other = fit(alone, **options)
    history = watch.history
    sites = [site.name for site in history.layout.sites]
    return {
        "records": [
            {name: dict(zip(sites, numbers.tolist(), strict=True)) for name, numbers in history[i].values.items()}
            for i in range(len(history))
        ],
        "accumulated": [history[i].scalars.get("accumulated") for i in range(len(history))],
        "truths": watched.truths,
        "told": len(memory.records),
        "lines": lines.all,
        "warnings": lines.warnings,
        "notes": watch.verdict.notes,
        "bits": [{n: whole(p).numpy().tobytes() for n, p in m.named_parameters()} for m in (watched, alone)],
        "hooks": (hooks_of(watched, trainer), hooks_of(alone, other)),
        "reduced": ours.count - theirs.count,
    }


def fell_ill(on_alert: str) -> dict[str, Any]:
    lines, watch, module = Lines(), None, Lit(odd=("nan", 1))
    watch = GradWatch(sinks=(Log(),), on_alert=on_alert)  # type: ignore[arg-type]
    raised = ""
    try:
        fit(module, watch)
    except AlertRaised as error:
        raised = str(error)
    return {"warnings": lines.warnings, "steps": len(module.truths), "raised": raised}


def broken(part: str, rank: int, after: int) -> dict[str, Any]:
    """Something of ours fails on one rank, in its step number `after`."""
    from importlib import import_module

    module, owner, method = part.rsplit(".", 2)
    cls = getattr(import_module(module), owner)
    original, calls = getattr(cls, method), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(part)
        if len(calls) > after and distributed.get_rank() == rank:
            raise PlannedError("inside")
        return original(*args, **kwargs)

    lines = Lines()
    setattr(cls, method, fails)
    try:
        watch, watched, alone = GradWatch(sinks=(Memory(),)), Lit(), Lit()
        trainer = fit(watched, watch, max_epochs=4)
    finally:
        setattr(cls, method, original)
    other = fit(alone, max_epochs=4)
    return {
        "bits": [{n: whole(p).numpy().tobytes() for n, p in m.named_parameters()} for m in (watched, alone)],
        "warnings": lines.warnings,
        "notes": watch.verdict.notes,
        "hooks": (hooks_of(watched, trainer), hooks_of(alone, other)),
    }


# ---- the tests


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_true_and_harmless(variant: str) -> None:
    module, options = VARIANTS[variant]
    known = "gradient_clip_val" in options
    told = ranks.run(trained, module, options)
    for rank in told:
        assert rank["notes"] == ()
        assert rank["warnings"] == []
        assert len(rank["records"]) == len(rank["truths"]) == -(-BATCHES // options.get("accumulate_grad_batches", 1))
        for number, (record, truth) in enumerate(zip(rank["records"], rank["truths"], strict=True)):
            sampled = number < FIRST_STEPS
            for statistic in STATISTICS if sampled else STATISTICS[: 1 + known]:
                shown = [record[statistic][site] for site in truth[statistic]]
                # the difference of two float32 weights is good to 1e-7 of the weight
                rtol = 1e-3 if statistic == "update_ratio" else 1e-5
                np.testing.assert_allclose(shown, list(truth[statistic].values()), rtol, err_msg=statistic)
            if not sampled and module.get("clip"):  # seen, but nobody told all ranks to measure it
                assert math.isnan(record["grad_norm_clipped"]["total"])
            elif not sampled and not known:
                np.testing.assert_equal(record["grad_norm_clipped"], record["grad_norm"])
        assert rank["bits"][0] == rank["bits"][1]
        assert rank["hooks"][0] == rank["hooks"][1]
        # one all-reduce a step; one more after it on sampled steps, and where the Trainer clips
        steps = len(rank["records"])
        assert rank["reduced"] == steps + (steps if known else min(steps, FIRST_STEPS))
    first, *rest = told
    assert first["told"] == len(first["records"])
    assert "summed over shards" in first["lines"][0]
    assert "every 25 steps" in first["lines"][0]
    for second in rest:
        assert second["told"] == 0
        assert second["lines"] == []
        for one, other in zip(first["records"], second["records"], strict=True):
            for statistic in STATISTICS:
                assert repr(one.get(statistic)) == repr(other.get(statistic)), "all ranks have the same numbers"
        if "accumulate_grad_batches" in options:
            assert first["accumulated"] == second["accumulated"] == [3, 3, 2]


def clipped_for_long() -> list[tuple[int, float, float, float]]:
    """Steps, and what was shown and true of the clipped total."""
    watch, module = GradWatch(sinks=(Memory(),)), Lit(clip=0.01)
    fit(module, watch, max_epochs=6)
    shown = watch.history.series("grad_norm_clipped")
    return [(step, float(shown[step]), truth["grad_norm_clipped"]["total"]) for step, truth in enumerate(module.truths)]


def test_an_edit_that_torch_does_not_show_is_looked_for_on_all_ranks() -> None:
    """Samples tell of it; until all ranks must have heard, it is not known what the optimizer used."""
    first, second = ranks.run(clipped_for_long)
    assert repr(first) == repr(second)
    known = [step for step, shown, _ in first if not math.isnan(shown)]
    assert known[:FIRST_STEPS] == list(range(FIRST_STEPS))
    assert known[-10:] == list(range(len(first) - 10, len(first)))
    for _, shown, truth in first:
        assert math.isnan(shown) or shown == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("on_alert", ["log", "raise", "stop"])
def test_a_nan_is_one_alert_that_names_the_rank(on_alert: str) -> None:
    first, second = ranks.run(fell_ill, on_alert)
    assert second["warnings"] == []
    (text,) = first["warnings"]
    assert text.startswith("nonfinite in model.0, model.2, model.4 since step 6: No layer has a finite gradient")
    assert "on rank 1" in text
    assert first["steps"] == second["steps"] == (BATCHES if on_alert == "log" else SICK + 1)
    assert first["raised"] == second["raised"] == (text if on_alert == "raise" else "")


@pytest.mark.parametrize(
    ("part", "rank"),
    [
        ("gradwatch.measure.optimizer_parameters.OptimizerParameters.reduce", 0),
        ("gradwatch.measure.optimizer_parameters.OptimizerParameters.reduce", 1),
        ("gradwatch.measure.optimizer_parameters.OptimizerParameters.moved", 1),
        ("gradwatch.core.history.History.append", 0),
    ],
)
def test_a_failure_of_ours_on_one_rank_leaves_the_training_alone(part: str, rank: int) -> None:
    """Every rank waits for all others in an all-reduce, so that none may just go."""
    told = ranks.run(broken, part, rank, 3)
    for place, result in enumerate(told):
        assert result["bits"][0] == result["bits"][1]
        assert result["hooks"][0] == result["hooks"][1]
        reason = "PlannedError: inside" if place == rank else "RuntimeError: something failed on another rank"
        note = f"GradWatch failed on rank {place} and watches no more, the training goes on: {reason}"
        assert result["warnings"] == [note]
        assert result["notes"] == (note,)
