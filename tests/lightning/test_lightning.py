"""Through a Trainer, of either package and in every mode of training, the numbers and the weights are the same ones."""

from __future__ import annotations

import gc
import logging
import weakref
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import quick
from architectures import CATALOGUE
from gradwatch import GradWatch, Watch
from gradwatch.core.alert import AlertRaised
from gradwatch.sinks.memory import Memory
from reference import bits, gradient_norms, hooks_on
from training import quiet_trainer

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
BATCHES = 10


pytestmark = pytest.mark.usefixtures("quiet")


def architecture_module(package: str, name: str, *, manual: bool = False) -> Any:
    """A LightningModule around an architecture, which takes down what is true at every step."""
    architecture = CATALOGUE[name]
    pl = import_module(package)

    class ArchitectureModule(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = architecture.build()
            self.automatic_optimization = not manual
            self.before: list[dict[str, float]] = []
            self.after: list[dict[str, float]] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            loss = architecture.loss(self.model, batch_idx)
            if not manual:
                return loss
            # each optimizer steps in its turn, the second every other batch
            first, second = self.optimizers()
            for optimizer in (first, second) if batch_idx % 2 else (first,):
                optimizer.zero_grad()
                self.manual_backward(architecture.loss(self.model, batch_idx))
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
            return None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.before.append(gradient_norms(self, optimizer))

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)
            self.after.append(gradient_norms(self, optimizer))

        def configure_optimizers(self) -> Any:
            parameters = list(self.model.parameters())
            if not manual:
                return torch.optim.AdamW(parameters, lr=1e-3)
            half = len(parameters) // 2
            return torch.optim.AdamW(parameters[:half], lr=1e-3), torch.optim.SGD(parameters[half:], lr=1e-2)

    return ArchitectureModule()


def fit_architecture(package: str, module: Any, *callbacks: Any, epochs: int = 1, **more: Any) -> Any:
    trainer = quiet_trainer(*callbacks, package=package, max_epochs=epochs, **more)
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(torch.arange(float(BATCHES)), batch_size=1))  # type: ignore[arg-type]
    return trainer


def compare(records: Any, truths: list[dict[str, float]], statistic: str, rtol: float) -> None:
    assert len(records) == len(truths)
    for record, truth in zip(records, truths, strict=True):
        sites = list(truth)
        shown = [record.value(statistic, site) for site in sites]
        np.testing.assert_allclose(shown, [truth[site] for site in sites], rtol, err_msg=f"{statistic} {record.step}")


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 4},
    "clipped": {"gradient_clip_val": 0.05},
    "clipped by value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed", "gradient_clip_val": 0.05},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true", "accumulate_grad_batches": 3},
}
CASES = [
    *((mode, "shared_and_tied", PACKAGES[0]) for mode in MODES),
    ("plain", "wide_mlp", PACKAGES[0]),
    ("accumulated", "in_place_resnet", PACKAGES[0]),
    ("clipped", "lstm", PACKAGES[0]),
    ("clipped", "multihead_attention", PACKAGES[0]),
    ("accumulated", "checkpointed", PACKAGES[0]),
    *(pytest.param(mode, "gpt2", PACKAGES[0], marks=pytest.mark.slow) for mode in ("accumulated", "bf16-mixed")),
    *(pytest.param(mode, "shared_and_tied", PACKAGES[1], marks=pytest.mark.slow) for mode in MODES),
]


@pytest.mark.parametrize(("mode", "name", "package"), CASES)
def test_true_and_harmless(mode: str, name: str, package: str) -> None:
    memory = Memory()
    module = architecture_module(package, name)
    watch = GradWatch(sinks=(memory,))
    trainer = fit_architecture(package, module, watch, **MODES[mode])
    assert not watch.verdict.notes
    assert len(memory.records) == trainer.global_step == -(-BATCHES // MODES[mode].get("accumulate_grad_batches", 1))
    rtol = 2e-3 if mode == "bf16-true" else 1e-5
    compare(memory.records, module.before, "grad_norm", rtol)
    compare(memory.records, module.after, "grad_norm_clipped", rtol)
    if mode == "accumulated":
        assert [record.scalars["accumulated"] for record in memory.records] == [4, 4, 2]
        assert {record.scalars["accumulate"] for record in memory.records} == {4}
    assert hooks_on(module, *trainer.optimizers) == []
    alone = architecture_module(package, name)
    fit_architecture(package, alone, **MODES[mode])
    assert bits(module) == bits(alone)


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
def test_two_optimizers_by_hand(package: str) -> None:
    """Each record is one optimizer's: its own gradients, not the stale ones of the other."""
    memory = Memory()
    module = architecture_module(package, "mlp", manual=True)
    trainer = fit_architecture(package, module, GradWatch(sinks=(memory,)))
    assert [record.optimizer for record in memory.records] == [0, 0, 1] * (BATCHES // 2)
    compare(memory.records, module.before, "grad_norm", 1e-5)
    for record in memory.records:
        others = {"model.3.weight", "model.3.bias"} if record.optimizer == 0 else {"model.0.weight", "model.0.bias"}
        assert {site for site, why in record.missing.items() if "another optimizer" in why} >= others
    assert hooks_on(module, *trainer.optimizers) == []
    alone = architecture_module(package, "mlp", manual=True)
    fit_architecture(package, alone)
    assert bits(module) == bits(alone)


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
def test_loss_scale_is_taken_out(package: str) -> None:
    """fp16 with a scale that overflows at first: skipped steps are reported, the others unscaled."""
    plugins = import_module(f"{package}.plugins.precision")
    results = []
    for watched in (True, False):
        memory = Memory()
        module = architecture_module(package, "wide_mlp")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=100)
        plugin = plugins.MixedPrecision("16-mixed", "cpu", scaler)
        fit_architecture(package, module, *([GradWatch(sinks=(memory,))] if watched else []), plugins=plugin)
        results.append(bits(module))
        if watched:
            compare(memory.records, module.before, "grad_norm", 1e-5)
            skipped = [bool(record.scalars.get("skipped")) for record in memory.records]
            overflowed = [not np.isfinite(truth["total"]) for truth in module.before]
            assert skipped == overflowed
            assert any(overflowed)
            assert not all(overflowed)
    assert results[0] == results[1]


class PlannedError(RuntimeError):
    pass


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
@pytest.mark.parametrize("place", ["training_step", "backward", "optimizer_step", "on_train_batch_end"])
def test_hooks_go_when_training_fails(place: str, package: str) -> None:
    module = architecture_module(package, "in_place_resnet")
    method = getattr(module, place)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if module.trainer.global_step >= 3:
            raise PlannedError
        return method(*args, **kwargs)

    setattr(module, place, fails)
    memory = Memory()
    watch = GradWatch(sinks=(memory,))
    with pytest.raises(PlannedError):
        fit_architecture(package, module, watch)
    assert hooks_on(module, *module.trainer.optimizers) == []
    assert memory.verdict is not None
    assert len(memory.records) >= 3


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
@pytest.mark.parametrize("bar", [False, True])
def test_watch_outlives_the_model(bar: bool, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After the fit, and after an evaluation that follows it, the callback holds numbers only."""
    watch = GradWatch(sinks=(Memory(),))
    module = architecture_module(package, "mlp")
    bars = [import_module(f"{package}.callbacks").TQDMProgressBar()] if bar else []
    trainer = fit_architecture(package, module, watch, *bars, enable_progress_bar=bar)
    module.validation_step = lambda batch, batch_idx: None
    trainer.validate(module, DataLoader(torch.zeros(1)), verbose=False)  # type: ignore[arg-type]
    gone = weakref.ref(module)
    del module, trainer, bars
    gc.collect()
    assert gone() is None
    assert len(watch.history) == BATCHES


def test_two_fits_and_validation_double_nothing() -> None:
    """The same callback in two fits of one model, with validation between: one record a step each time."""
    memory = Memory()
    watch = GradWatch(sinks=(memory,))
    module = architecture_module("lightning.pytorch", "in_place_resnet")
    attached: list[int] = []

    def validation_step(batch: Tensor, batch_idx: int) -> None:
        attached.append(sum("_forward_hooks" in hook for hook in hooks_on(module)))
        CATALOGUE["in_place_resnet"].loss(module.model, batch_idx)

    module.validation_step = validation_step
    for fits in (1, 2):
        trainer = quiet_trainer(watch, max_steps=4, val_check_interval=2)
        loader = DataLoader(torch.arange(4.0))  # type: ignore[arg-type]
        trainer.fit(module, loader, loader)
        assert len(memory.records) == 4 * fits
        assert len(watch.history) == 4
        assert all("signal_norm" in record.fresh for record in memory.records)
        assert hooks_on(module, *trainer.optimizers) == []
    compare(memory.records, module.before, "grad_norm", 1e-5)
    assert attached
    assert not any(attached), "module hooks during validation"


def test_engine_failure_at_the_start_leaves_the_fit_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise PlannedError("at the start")

    monkeypatch.setattr("gradwatch.measure.parameter_hooks.ParameterHooks.arm", fails)
    module = architecture_module("lightning.pytorch", "mlp")
    watch = GradWatch(sinks=())
    trainer = fit_architecture("lightning.pytorch", module, watch)
    assert trainer.global_step == BATCHES
    assert watch.verdict.lines[0] == "GradWatch: no step was measured."
    assert [r.getMessage() for r in caplog.records if r.name == "gradwatch" and r.levelno >= logging.WARNING] == [
        "GradWatch failed and watches no more, the training goes on: PlannedError: at the start"
    ]
    alone = architecture_module("lightning.pytorch", "mlp")
    fit_architecture("lightning.pytorch", alone)
    assert bits(module) == bits(alone)


def test_a_fit_that_an_alert_ends_keeps_its_weights() -> None:
    module = architecture_module("lightning.pytorch", "mlp")
    loss = CATALOGUE["mlp"].loss
    module.training_step = lambda _, batch_idx: loss(module.model, batch_idx) * (np.nan if batch_idx == 3 else 1.0)
    with pytest.raises(AlertRaised):
        fit_architecture("lightning.pytorch", module, GradWatch(sinks=(), on_alert="raise"))
    assert len(module.before) == 3, "the step itself is not taken"
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_no_match_is_said_at_fit_start() -> None:
    module = architecture_module("lightning.pytorch", "mlp")
    with pytest.raises(ValueError, match=r"'model\.9' matches no layer.*model\.0, model\.3|model\.3, model\.0"):
        fit_architecture("lightning.pytorch", module, GradWatch(layers="model.9"))


def test_lbfgs_steps_with_a_closure() -> None:
    """Several backward passes inside one optimizer step: one record, of the gradient at the weights it began with."""
    module = architecture_module("lightning.pytorch", "mlp")
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters(), max_iter=3, lr=0.1)
    memory = Memory()
    fit_architecture("lightning.pytorch", module, GradWatch(sinks=(memory,)))
    alone = architecture_module("lightning.pytorch", "mlp")
    alone.configure_optimizers = lambda: torch.optim.LBFGS(alone.parameters(), max_iter=3, lr=0.1)
    fit_architecture("lightning.pytorch", alone)
    assert bits(module) == bits(alone)
    assert [record.scalars["closures"] for record in memory.records] == [3] * BATCHES
    compare(memory.records, module.before[::3], "grad_norm", 1e-5)


def test_plain_loop_in_a_step_of_lightnings() -> None:
    """Watch itself, with the module of a Trainer as any other model."""
    module = architecture_module("lightning.pytorch", "mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Watch(module, sinks=()) as watch:
        nn.functional.mse_loss(module.model(torch.randn(2, 12)), torch.zeros(2, 4)).backward()
        watch.step(optimizer)
        optimizer.step()
    assert watch.history.sites("grad_norm")[:2] == ("model.0", "model.3")
