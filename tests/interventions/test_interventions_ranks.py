"""Over ranks: clipping is of the whole gradient, and weights stay bit for bit the same on all."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor, distributed

import ddp_training
import ranks
import sharded_training
from clipping_reference import far, joint_factors, layer_of
from gradwatch import AdaptiveClip, Clip, GradWatch, Scale, SpikeClip, Zero
from gradwatch.core.schedule import FIRST_STEPS
from gradwatch.sinks.memory import Memory
from reference import names

LIMIT = 0.01


class Whole(pl.Callback):
    """Takes down the whole gradients, of shards too, float64; every rank asks."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        there = {name: p.grad for name, (_, p) in names(pl_module).items() if p.grad is not None}
        self.steps.append({name: sharded_training.whole(gradient).double().clone() for name, gradient in there.items()})


def clipped(kind: str, options: dict[str, Any], parallel: str = "layers") -> dict[str, Any]:
    """A fit in which every layer is clipped: how far that is from right, and what became of the weights."""
    lines, memory, before, after = ddp_training.Lines(), Memory(), Whole(), Whole()
    watch = GradWatch(interventions=[Clip(LIMIT)], sinks=(memory,))
    module: Any = (
        sharded_training.ShardedModule(parallel=parallel, known=0) if kind == "fsdp" else ddp_training.SeededModule()
    )
    fit = sharded_training.fit_sharded if kind == "fsdp" else ddp_training.fit_on_ranks
    fit(module, before, watch, after, **options)
    errors, acted = [], 0
    for was, now in zip(before.steps, after.steps, strict=True):
        factors = joint_factors(was, module, LIMIT)
        acted += any(factor < 1.0 for factor in factors.values())
        errors += [far(now[name], gradient * factors[layer_of(name, module)]) for name, gradient in was.items()]
    weights = {name: sharded_training.whole(p).numpy().tobytes() for name, (_, p) in names(module).items()}
    reported = str(watch.verdict)
    rates = watch.history.series("clip_rate").tolist() if len(watch.history) else []
    return {
        "error": max(errors),
        "acted": acted,
        "weights": weights,
        "warnings": lines.warnings,
        "reported": reported,
        "rates": rates,
    }


VARIANTS: dict[str, tuple[Any, ...]] = {
    "DDP": ("ddp", {}),
    "DDP, bucket views": ("ddp", {"ddp": {"gradient_as_bucket_view": True}}),
    "DDP, accumulated, an incomplete window": ("ddp", {"accumulate_grad_batches": 4}),
    "DDP, fp16": ("ddp", {"fp16": 2**10, "accumulate_grad_batches": 3}),
    "FSDP2": ("fsdp", {}),
    "FSDP2, all in one": ("fsdp", {}, "root"),
    "FSDP2, accumulated": ("fsdp", {"accumulate_grad_batches": 3}),
    "tensor parallel": ("fsdp", {}, "tensor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_clipping_of_the_whole(variant: str) -> None:
    first, second = ranks.run(clipped, *VARIANTS[variant])
    for rank in (first, second):
        assert rank["error"] <= 1e-6
        assert rank["acted"]
        assert rank["warnings"] == []
        assert "Clip at norm 0.01 per layer changed 3 of 3 layers" in rank["reported"]
    assert first["weights"] == second["weights"]
    assert first["rates"] == second["rates"]


def failing(kind: str, owner: str, method: str, first: int = 3) -> dict[str, Any]:
    """Something of ours fails on rank 1 from its call number `first` on."""
    home, _, name = owner.rpartition(".")
    cls = getattr(import_module(home), name)
    original, calls = getattr(cls, method), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        if len(calls) > first and distributed.get_rank() == 1:
            raise ddp_training.PlannedError("inside")
        return original(*args, **kwargs)

    setattr(cls, method, fails)
    try:
        return clipped(kind, {})
    finally:
        setattr(cls, method, original)


FAILURES = [
    ("ddp", "gradwatch.engine.block_builder.BlockBuilder", "build", 0),  # a block has several steps
    ("ddp", "gradwatch.measure.modules.sampled_step.SampledStep", "collect", 3),
    ("ddp", "gradwatch.measure.stale_gradients.StaleGradientCheck", "take", 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "owner", "method", "calls"), FAILURES)
def test_a_failure_of_the_watching_on_one_rank_ends_no_intervention(
    kind: str, owner: str, method: str, calls: int
) -> None:
    first, second = ranks.run(failing, kind, owner, method, calls)
    assert (
        "failed on rank 1 and watches no more, the training goes on, and so do the interventions" in second["reported"]
    )
    for rank in (first, second):
        assert rank["error"] <= 2e-6
    assert first["weights"] == second["weights"]


@pytest.mark.slow
def test_a_failure_on_one_shard_ends_interventions_on_all() -> None:
    first, second = ranks.run(failing, "fsdp", "gradwatch.measure.stale_gradients.StaleGradientCheck", "take")
    assert "PlannedError" in second["reported"]
    assert first["weights"] == second["weights"]


@pytest.mark.slow
def test_a_failure_after_the_exchange_of_norms_brings_no_second_exchange() -> None:
    """The ranks would wait for each other."""
    first, second = ranks.run(failing, "fsdp", "gradwatch.engine.engine", "read", FIRST_STEPS, timeout=60.0)
    assert "PlannedError" in second["reported"]
    assert first["weights"] == second["weights"]


def scheduled() -> dict[str, Any]:
    """A schedule that fails on rank 1 in the third step."""

    def factor(step: int) -> float:
        if step == 2 and distributed.get_rank() == 1:
            raise ddp_training.PlannedError("no such step")
        return 0.5

    lines, watch = ddp_training.Lines(), GradWatch(interventions=[Scale(factor), Clip(LIMIT)], sinks=())
    ddp_training.fit_on_ranks(ddp_training.SeededModule(), watch)
    return {"warnings": lines.warnings, "notes": watch.verdict.notes, "reported": watch.verdict.interventions}


@pytest.mark.slow
def test_what_fails_on_one_rank_says_where_and_what_that_means() -> None:
    first, second = ranks.run(scheduled)
    assert first["notes"] == ()
    assert "changed 3 of 3 layers" in second["reported"][1]
    for said in (second["notes"][0], second["warnings"][0]):
        where = "on rank 1 (ranks on which it still acts get other weights than this one)"
        assert f"Scale by a schedule {where} failed" in said


def edited() -> dict[str, Any]:
    """Elements clipped, one layer zeroed and one scaled, of shards: what the gradients became."""
    lines, before, after = ddp_training.Lines(), Whole(), Whole()
    interventions = [Clip(value=1e-4, layers="model.0"), Zero(layers="model.2"), Scale(0.5, layers="model.4")]
    watch, module = GradWatch(interventions=interventions, sinks=()), sharded_training.ShardedModule(known=0)
    sharded_training.fit_sharded(module, before, watch, after)
    errors = []
    for was, now in zip(before.steps, after.steps, strict=True):
        for name, gradient in was.items():
            layer = layer_of(name, module)
            right = {"model.0": gradient.clamp(-1e-4, 1e-4), "model.2": gradient * 0, "model.4": gradient * 0.5}[layer]
            errors.append(float((now[name] - right).abs().max()))
    norms = [float(now["model.0.weight"].norm()) for now in after.steps]
    return {
        "error": max(errors),
        "warnings": lines.warnings,
        "shown": watch.history.series("grad_norm_clipped", "model.0.weight").tolist(),
        "norms": norms,
        "reported": str(watch.verdict),
    }


@pytest.mark.slow
def test_elements_of_shards() -> None:
    for rank in ranks.run(edited):
        assert rank["error"] < 1e-9
        assert rank["warnings"] == []
        assert rank["shown"] == pytest.approx(rank["norms"], rel=1e-5)
        assert "Clip elements at 0.0001 changed 1 of 1 layers" in rank["reported"]


def unit_by_unit(kind: str, parallel: str) -> dict[str, Any]:
    """Every unit clipped as the paper has it, and what little is left against its history: how far that is off."""
    lines, weights, before, after = ddp_training.Lines(), Weights(), Whole(), Whole()
    large_step = Scale(lambda step: 100.0 if step == 6 else 1.0, layers="model.4")
    interventions = [AdaptiveClip(0.01), large_step, SpikeClip(window=5, warmup=3, layers="model.4", dry_run=True)]
    watch: Any = GradWatch(interventions=interventions, sinks=())
    module: Any = (
        sharded_training.ShardedModule(parallel=parallel, known=0) if kind == "fsdp" else ddp_training.SeededModule()
    )
    fit = sharded_training.fit_sharded if kind == "fsdp" else ddp_training.fit_on_ranks
    fit(module, before, weights, watch, after)
    errors, touched = [], 0
    for step, (old, was, now) in enumerate(zip(weights.steps, before.steps, after.steps, strict=True)):
        for name, gradient in was.items():
            dims = tuple(range(gradient.ndim) if gradient.ndim < 2 else range(1, gradient.ndim))
            norm, weight = (t.norm(dim=dims, keepdim=True) for t in (gradient, old[name]))
            factor = (0.01 * weight.clamp(min=1e-3) / norm).clamp(max=1.0).nan_to_num(1.0)
            more = 100.0 if step == 6 and layer_of(name, module) == "model.4" else 1.0
            errors.append(far(now[name], gradient * factor * more))
            touched += bool((factor < 1.0).any())
    return {
        "error": max(errors),
        "touched": touched,
        "weights": {name: sharded_training.whole(p).numpy().tobytes() for name, (_, p) in names(module).items()},
        "warnings": lines.warnings,
        "reported": watch.verdict.interventions,
        "rates": watch.history.series("clip_rate").tolist(),
    }


class Weights(Whole):
    """Takes down the whole weights before each step."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.steps.append({n: sharded_training.whole(p).double().clone() for n, (_, p) in names(pl_module).items()})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "parallel"), [("ddp", ""), ("fsdp", "layers"), ("fsdp", "tensor")])
def test_units_and_histories_are_of_the_whole(kind: str, parallel: str) -> None:
    first, second = ranks.run(unit_by_unit, kind, parallel)
    for rank in (first, second):
        assert rank["error"] <= 2e-6
        assert rank["touched"]
        assert rank["warnings"] == []
    assert "SpikeClip at 4 deviations per layer would have changed 1 of 1 layers in 1" in first["reported"][2]
    assert first["weights"] == second["weights"]
    if kind == "fsdp":
        assert first["reported"] == second["reported"]
        assert first["rates"] == second["rates"]


def signals_clipped() -> dict[str, Any]:
    """Each rank's signals clipped by themselves: the weights, and what was reported."""
    lines = ddp_training.Lines()
    watch, module = (
        GradWatch(interventions=[Clip(1e-4, layers="model.2", on="signal")], sinks=()),
        ddp_training.SeededModule(),
    )
    ddp_training.fit_on_ranks(module, watch, accumulate_grad_batches=2)
    weights = {name: p.detach().numpy().tobytes() for name, (_, p) in names(module).items()}
    return {"weights": weights, "warnings": lines.warnings, "reported": str(watch.verdict)}


@pytest.mark.slow
def test_signals_are_each_ranks_own_and_weights_stay_in_step() -> None:
    first, second = ranks.run(signals_clipped)
    assert first["weights"] == second["weights"]
    assert first["warnings"] == second["warnings"] == []
    assert "Clip at norm 0.0001 per layer changed 1 of 1 layers in 100 %" in first["reported"]
