"""Tapped tensors in Lightning: accumulated, scaled, over ranks, resumed, and left alone in validation."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import quick
import ranks
from gradwatch import GradWatch
from gradwatch.measure import tensor_taps
from gradwatch.runs.arrays import read
from gradwatch.sinks.memory import Memory
from gradwatch.sinks.tensorboard.sink import TensorBoard
from gradwatch.sinks.terminal.console import Console
from reference import bits, hooks_on
from tapped_models import Tapping, loop, loss_of, truth_of
from training import fit

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
pytestmark = pytest.mark.usefixtures("quiet")


def tapped_module(package: str, *, manual: bool = False) -> Any:
    pl: Any = import_module(package)

    class TappedModule(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Tapping(loop)
            self.automatic_optimization = not manual
            self.truths: list[dict[str, float]] = []
            self.seeds: list[int] = []
            self.validated: list[bool] = []

        def training_step(self, number: Tensor, _: int) -> Tensor | None:
            seed = int(number) + 1000 * self.global_rank
            self.seeds = [*(self.seeds if self.automatic_optimization else ()), seed]
            if self.automatic_optimization:
                return loss_of(self.model, seed)
            for optimizer in self.optimizers():
                self.take_down(1)
                optimizer.zero_grad()
                self.manual_backward(loss_of(self.model, seed))
                optimizer.step()
            return None

        def take_down(self, parts: int) -> None:
            """What is true of a step that is the mean of `parts` micro-batches."""
            losses = [lambda m, seed=seed: loss_of(m, seed) / parts for seed in self.seeds]
            self.truths.append(truth_of(self.model, *losses))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.automatic_optimization:
                self.take_down(self.trainer.accumulate_grad_batches)
                self.seeds.clear()

        def validation_step(self, number: Tensor, _: int) -> None:
            with torch.enable_grad():  # as one does for a saliency map
                loss_of(self.model, int(number)).backward()
                self.validated.append(
                    any(taps.in_batch for watch in tensor_taps.active if (taps := watch()) is not None)
                )
            self.zero_grad()

        def train_dataloader(self) -> Any:
            return DataLoader(torch.arange(10))

        def val_dataloader(self) -> Any:
            return DataLoader(torch.arange(3))

        def configure_optimizers(self) -> Any:
            if self.automatic_optimization:
                return torch.optim.SGD(self.parameters(), lr=0.05)
            return tuple(torch.optim.SGD(half.parameters(), lr=0.05) for half in (self.model.first, self.model.last))

    return TappedModule()


def check(watch: GradWatch, truths: list[dict[str, float]]) -> None:
    assert len(watch.history) == len(truths)
    for name in ("hidden", "state", "logits"):
        expected = [truth[name] for truth in truths]
        np.testing.assert_allclose(watch.history.series("grad_norm", name), expected, 1e-5, err_msg=name)


def fp16(package: str) -> dict[str, Any]:
    plugin = import_module(f"{package}.plugins.precision").MixedPrecision
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
    return {"plugins": plugin("16-mixed", "cpu", scaler)}


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
@pytest.mark.parametrize("name", ["plain", "accumulated", "manual"])
def test_the_number_is_what_flows_back(package: str, name: str) -> None:
    """Four micro-batches a step leave a last window of two."""
    options = {"accumulate_grad_batches": 4} if name == "accumulated" else {}
    watch, module = GradWatch(sinks=()), tapped_module(package, manual=name == "manual")
    trainer = fit(module, watch, max_epochs=2, **options, package=package, inference_mode=False)
    assert len(module.truths) == {"plain": 20, "accumulated": 6, "manual": 40}[name]
    check(watch, module.truths)
    assert set(module.validated) == {False}
    assert hooks_on(module, *trainer.optimizers) == []
    assert tensor_taps.active == ()

    alone = tapped_module(package, manual=name == "manual")
    fit(alone, max_epochs=2, **options, package=package, inference_mode=False)
    assert bits(module) == bits(alone)


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
def test_the_loss_scale_is_taken_out(package: str) -> None:
    """Of a half-precision forward the truth is known to the half's three digits; the scale changes by powers of 2."""
    watch, module = GradWatch(sinks=()), tapped_module(package)
    fit(module, watch, **fp16(package), accumulate_grad_batches=2, package=package, inference_mode=False)
    assert len(module.truths) == 5
    for name in ("hidden", "state", "logits"):
        expected = [truth[name] for truth in module.truths]
        np.testing.assert_allclose(watch.history.series("grad_norm", name), expected, 0.02, err_msg=name)


def test_a_second_fit_begins_anew() -> None:
    package = PACKAGES[0]
    watch = GradWatch(sinks=())
    for _ in range(2):
        module = tapped_module(package)
        fit(module, watch, package=package, inference_mode=False)
        check(watch, module.truths)


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
def test_a_resumed_run_goes_on_with_them(package: str, tmp_path: Path) -> None:
    whole, first, second = (GradWatch(sinks=()) for _ in range(3))
    module = tapped_module(package)
    fit(module, whole, max_epochs=2, package=package, inference_mode=False)
    trainer = fit(tapped_module(package), first, package=package, inference_mode=False)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    fit(tapped_module(package), second, max_epochs=2, ckpt=tmp_path / "a.ckpt", package=package, inference_mode=False)
    assert second.history.layout.names(second.history.layout.taps) == ("hidden", "state", "logits")
    assert second.history.sites("grad_norm") == whole.history.sites("grad_norm")
    assert second.history.layout.order == whole.history.layout.order != ()
    for site in second.history.sites("grad_norm"):
        ours, theirs = second.history.series("grad_norm", site), whole.history.series("grad_norm", site)
        np.testing.assert_allclose(ours, theirs, 1e-6)


def test_a_resumed_run_that_taps_others(tmp_path: Path) -> None:
    package = PACKAGES[0]
    first, second = GradWatch(sinks=()), GradWatch(sinks=())
    trainer = fit(tapped_module(package), first, package=package, inference_mode=False)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = tapped_module(package)
    module.model.inner = lambda hidden, tap, reference: tap(hidden * 2, "new")
    fit(module, second, max_epochs=2, ckpt=tmp_path / "a.ckpt", package=package, inference_mode=False)
    series = second.history.series
    assert np.isnan(series("grad_norm", "state")[10:]).all()
    assert (series("grad_norm", "state")[:10] > 0).all()
    assert np.isnan(series("grad_norm", "new")[:10]).all()
    assert (series("grad_norm", "new")[10:] > 0).all()
    assert (series("grad_norm", "hidden") > 0).all()
    assert second.verdict.healthy


def test_on_the_dashboards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    memory = Memory()
    watch, module = GradWatch(sinks=(memory, Console(width=100), TensorBoard())), tapped_module(PACKAGES[0])
    fit(module, watch, logger=TensorBoardLogger(tmp_path), package=PACKAGES[0], inference_mode=False)
    printed = capsys.readouterr().out.splitlines()
    (row,) = [line for line in printed if line.startswith("state (tap)")]
    assert row.endswith("ok")
    assert printed.index(row) > next(i for i, line in enumerate(printed) if line.startswith("model.last"))
    assert any("2 layers over 10 steps" in line for line in printed)

    run = read(watch_dir(tmp_path))
    layout = memory.records[0].layout
    assert [site.module for site in run.layout.sites].count("tap") == 3
    there = [*layout.names(layout.layers), *layout.names(layout.taps)]
    assert run.names[1:] == tuple(there)
    series = np.stack([watch.history.series("grad_norm", name) for name in there], axis=1)
    np.testing.assert_allclose(run.values["grad_norm"].numbers[:, 1:], series, rtol=1e-6)


def watch_dir(folder: Path) -> str:
    return str(next(folder.rglob("events.out.tfevents*")).parent)


def trained() -> dict[str, Any]:
    """On each rank."""
    from lightning.pytorch.strategies import DDPStrategy

    watch, module, alone = GradWatch(sinks=()), tapped_module(PACKAGES[0]), tapped_module(PACKAGES[0])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for model, callbacks in ((module, [watch]), (alone, [])):
        strategy = DDPStrategy(process_group_backend="gloo")
        options = {"devices": ranks.SIZE, "strategy": strategy, "use_distributed_sampler": False}
        fit(
            model,
            *callbacks,
            accumulate_grad_batches=2,
            limit_val_batches=0,
            **options,
            package=PACKAGES[0],
            inference_mode=False,
        )
    return {
        "series": {name: watch.history.series("grad_norm", name).tolist() for name in ("hidden", "state", "logits")},
        "truths": module.truths,
        "same": bits(module) == bits(alone),
        "notes": watch.verdict.notes,
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_rank_has_its_own() -> None:
    first, second = ranks.run(trained)
    assert first["same"]
    assert first["notes"] == second["notes"] == ()
    for result in (first, second):
        for name, series in result["series"].items():
            np.testing.assert_allclose(series, [truth[name] for truth in result["truths"]], 1e-5)
    assert first["series"] != second["series"]


def test_a_frozen_trunk_needs_no_gradient() -> None:
    """What is tapped behind it has none; the rest does."""
    module = tapped_module(PACKAGES[0])
    module.model.first.requires_grad_(False)
    watch = GradWatch(sinks=())
    fit(module, watch, package=PACKAGES[0], inference_mode=False)
    assert watch.history.layout.names(watch.history.layout.taps) == ("logits",)
    assert isinstance(module.model.first, nn.Linear)
