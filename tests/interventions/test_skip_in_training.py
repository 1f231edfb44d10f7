"""Steps that do not happen and trainings that end, with a Trainer: every mode, every rank, and what is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ddp_training
import quick
import ranks
import sharded_training
from gradwatch import Clip, GradWatch, SkipNonFinite, Stop
from gradwatch.interventions import Intervention
from gradwatch.sinks.headline_scalars import headlines
from reference import bits, names
from synthetic_records import block_of
from training import quiet_trainer


class NumberedBatches(pl.LightningModule):
    """Batches are numbers; those below 0 are poisoned."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.automatic_optimization = not manual
        self.stepped = 0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        seed = int(batch)
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(abs(seed)))
        loss = self.net(inputs * (float("nan") if seed < 0 else 1.0)).float().square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.stepped += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def fit_batches(
    interventions: list[Intervention],
    batches: list[float],
    *,
    manual: bool = False,
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> tuple[NumberedBatches, GradWatch, Any]:
    module, watch = NumberedBatches(manual=manual), GradWatch(interventions=interventions, sinks=())
    trainer = quiet_trainer(watch, *callbacks, **options)
    trainer.fit(module, DataLoader(torch.tensor(batches), batch_size=1))  # type: ignore[arg-type]
    return module, watch, trainer


GOOD = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
POISONED = [1.0, 2.0, -9.0, 3.0, 4.0, -9.0, -9.0, 5.0, 6.0]

WAYS: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "plain": ({}, POISONED, GOOD),
    "clipped by the Trainer": ({"gradient_clip_val": 0.1}, POISONED, GOOD),
    "clipped by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, POISONED, GOOD),
    "bf16": ({"precision": "bf16-mixed"}, POISONED, GOOD),
    "manual": ({"manual": True}, POISONED, GOOD),
    "accumulated": ({"accumulate_grad_batches": 2}, [1.0, 2.0, 3.0, -9.0, 5.0, 6.0], [1.0, 2.0, 5.0, 6.0]),
}


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
@pytest.mark.parametrize("way", quick.cases(WAYS, ("plain", "accumulated")))
def test_the_run_is_the_one_without_the_bad_batches(way: str) -> None:
    options, poisoned, good = WAYS[way]
    module, watch, _ = fit_batches([Clip(10.0), SkipNonFinite()], poisoned, **options)
    clean, _, _ = fit_batches([], good, **options)
    assert bits(module) == bits(clean)
    assert watch.verdict.notes == ()
    skipped = 1 if "accumulate_grad_batches" in options else 3
    assert headlines(block_of([watch.history[-1]]))["gradwatch/skipped_steps"] == skipped


class Written(pl.Callback):
    """Writes running statistics between two batches, as callbacks do that load, average or swap weights."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.net[1].running_mean.fill_(7.0)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.net[1].running_var.fill_(3.0)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_what_others_write_between_batches_is_put_back(accumulated: int) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulated, "max_epochs": 2}
    module, watch, _ = fit_batches([SkipNonFinite()], [-9.0, -9.0], callbacks=[Written()], **options)
    assert module.net[1].running_mean.tolist() == [7.0] * 8
    assert module.net[1].running_var.tolist() == [3.0] * 8
    assert int(module.net[1].num_batches_tracked) == 0
    assert watch.history.series("skipped_steps").tolist()[-1] == 4 / accumulated


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
def test_under_a_loss_scale_the_scaler_skips() -> None:
    def scaled() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))

    module, watch, trainer = fit_batches([SkipNonFinite(limit=2)], POISONED, plugins=scaled())
    assert all(bool(torch.isfinite(value).all()) for value in module.state_dict().values())
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**5
    assert module.stepped == len(POISONED)
    assert watch.history.series("skipped_steps").tolist() == [0] * len(POISONED)
    assert "SkipNonFinite left all steps to the fp16 scaler" in str(watch.verdict)
    assert watch.verdict.notes == ()


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
@pytest.mark.parametrize(
    "intervention", [SkipNonFinite(limit=2), Stop("nonfinite", after=1), Stop(severity="warning", after=1)]
)
def test_a_fit_ends_as_early_stopping_ends_it(intervention: Intervention) -> None:
    module, watch, trainer = fit_batches([intervention], [1.0, 2.0, -9.0, -9.0, 3.0, 4.0])
    assert module.stepped == 4
    assert trainer.state.finished
    assert "ended the training: " in str(watch.verdict)


def parallel(kind: str, interventions: list[Intervention], bad_rank: int) -> dict[str, Any]:
    """One batch is poisoned on one rank: what became of the weights, and what was said."""
    lines = ddp_training.Lines()
    watch = GradWatch(interventions=interventions, sinks=())
    if kind == "fsdp":
        module: Any = sharded_training.ShardedModule(odd=("nan", bad_rank), known=0)
        sharded_training.fit_sharded(module, watch)
    else:
        module = ddp_training.SeededModule(norm=True, odd=("loss", bad_rank))
        ddp_training.fit_on_ranks(
            module, watch, **({"ddp": {"gradient_as_bucket_view": True}} if kind == "views" else {})
        )
    weights = {name: sharded_training.whole(p) for name, (_, p) in names(module).items()}
    return {
        "weights": {name: tensor.numpy().tobytes() for name, tensor in weights.items()},
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()),
        "buffers": all(bool(torch.isfinite(tensor).all()) for tensor in module.buffers()),
        "skipped": watch.history.series("skipped_steps").tolist(),
        "reported": str(watch.verdict),
        "warnings": lines.warnings,
        "batches": len(watch.history),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "views", "fsdp"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_all_ranks_skip_together(kind: str, bad_rank: int) -> None:
    first, second = ranks.run(parallel, kind, [SkipNonFinite()], bad_rank)
    assert first["weights"] == second["weights"]
    assert first["skipped"] == second["skipped"]
    for rank in (first, second):
        assert rank["finite"]
        assert rank["buffers"]
        assert rank["skipped"][-1] == 1
        assert "Note:" not in rank["reported"]
    assert ["was skipped" in line for line in first["warnings"]] == [True]
    assert second["warnings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_ranks_stop_together(kind: str) -> None:
    first, second = ranks.run(parallel, kind, [SkipNonFinite(limit=1)], 1)
    assert (
        first["batches"] == second["batches"] < (sharded_training.BATCHES if kind == "fsdp" else ddp_training.BATCHES)
    )
    assert "ended the training: 1 steps in a row" in first["reported"]
