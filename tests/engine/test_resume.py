"""A run stopped at any step and resumed from its checkpoint raises the alerts of the uninterrupted one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quick
from gradwatch import GradWatch
from gradwatch.core.alert import Alert
from gradwatch.engine.joined_arrays import join_arrays, split_arrays
from gradwatch.sinks.log import Log
from gradwatch.sinks.memory import Memory
from models import mlp, module_of
from reference import bits, hooks_on
from training import BATCHES_AGAIN, fit, numbers

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
EPOCH = 10
"""Batches of an epoch, one step each."""


pytestmark = pytest.mark.usefixtures("quiet")


# ---- the runs: what is wrong, from which step, and how long they are


def error_of(model: nn.Module, step: int) -> Tensor:
    """Regression on data that the step alone decides."""
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 16, generator=random)
    return nn.functional.mse_loss(model(inputs), inputs[:, :4])


def spiked(model: nn.Module, step: int) -> Tensor:
    return error_of(model, step) * (1000.0 if step in (30, 31, 65) else 1.0)


def turns_nan(model: nn.Module, step: int) -> Tensor:
    return error_of(model, step) * (float("nan") if step >= 33 else 1.0)


def diverging(model: nn.Module, step: int) -> Tensor:
    return error_of(model, step) * (1.0 if step < 25 else 60.0)


@dataclass(frozen=True)
class Plan:
    """A run that goes wrong, and the steps before which it is stopped."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    rules: set[str]
    stops: tuple[int, ...]
    epochs: int = 5
    lr: float = 1e-3


PLANS = {
    "vanishing": Plan(lambda: mlp(4, inputs=16, depth=10, act=nn.Sigmoid), error_of, {"vanishing"}, (1, 2, 3, 20, 49)),
    "spike": Plan(
        lambda: mlp(4, inputs=16, depth=2, act=nn.ReLU),
        spiked,
        {"spike"},
        (25, 30, 31, 32, 45, 60, 66),
        epochs=8,
    ),
    "nan": Plan(lambda: mlp(4, inputs=16, depth=2, act=nn.Tanh), turns_nan, {"nonfinite"}, (32, 33, 34, 45)),
    "diverging": Plan(
        lambda: mlp(4, inputs=16, depth=1, act=nn.Identity),
        diverging,
        {"divergence", "nonfinite", "spike"},
        (20, 26, 30, 40),
        lr=0.1,
    ),
}


def fitted(package: str, plan: Plan, watch: Any, *more: Any, ckpt: Path | None = None, **options: Any) -> Any:
    """The module after a fit, by SGD; `ckpt`: where it goes on from."""
    torch.manual_seed(0)
    module = module_of(
        plan.build(), lambda net, batch, index: plan.loss(net, module.trainer.global_step), lr=plan.lr, package=package
    )
    trainer = fit(
        module, watch, *more, data=numbers(EPOCH), ckpt=ckpt, package=package, max_epochs=plan.epochs, **options
    )
    assert hooks_on(module, *trainer.optimizers) == []
    return module


def saves(package: str, folder: Path, stops: tuple[int, ...]) -> Any:
    """A callback that saves a checkpoint before each of the steps `stops`."""

    class Saves(import_module(package).Callback):  # type: ignore[misc]
        def save(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in stops:
                trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

    setattr(Saves, "on_train_batch_start" if BATCHES_AGAIN else "on_train_batch_end", Saves.save)
    return Saves()


def watching(*sinks: Any, **options: Any) -> GradWatch:
    """Sampled at fixed steps, whatever it costs: what the clock says decides nothing."""
    return GradWatch(sinks=sinks, budget=None, **options)


def incident(alert: Alert) -> tuple[Any, ...]:
    texts = alert.message, alert.remedy
    return alert.rule, alert.severity, alert.layer, alert.sites, alert.step, alert.closed_step, alert.times, *texts


def announced(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the logger `gradwatch` has warned of since it was last asked."""
    lines = [r.getMessage() for r in caplog.records if r.name == "gradwatch" and r.levelno >= logging.WARNING]
    caplog.clear()
    return lines


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("nan", PACKAGES[0]),
        pytest.param("spike", PACKAGES[0], marks=pytest.mark.slow),
        pytest.param("vanishing", PACKAGES[1], marks=pytest.mark.slow),
        pytest.param("diverging", PACKAGES[1], marks=pytest.mark.slow),
    ],
)
def test_the_same_alerts(name: str, package: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = PLANS[name]
    through = watching(Log())
    module = fitted(package, plan, through, saves(package, tmp_path, plan.stops))
    assert {one.rule for alert in through.alerts for one in (alert, *alert.effects)} == plan.rules
    assert not through.verdict.notes
    lines = announced(caplog)
    for stop in plan.stops:
        memory = Memory()
        resumed = watching(Log(), memory)
        again = fitted(package, plan, resumed, ckpt=tmp_path / f"{stop}.ckpt")
        assert memory.records[0].step == stop
        assert list(map(incident, resumed.alerts)) == list(map(incident, through.alerts)), stop
        # what was announced before the stop is not announced again
        later = [line[:40] for line in lines if noticed(line) >= stop]
        assert [line[:40] for line in announced(caplog)] == later
        assert resumed.history.steps == through.history.steps
        assert resumed.history.layout.order == through.history.layout.order
        assert resumed.history.layout.edges == through.history.layout.edges
        there = [through.history.series(name).tolist() for name in ("loss", "lr")]
        assert repr([resumed.history.series(name).tolist() for name in ("loss", "lr")]) == repr(there)
        assert sampled(resumed) == sampled(through)
        assert sampled(resumed, "zero_fraction") == sampled(through, "zero_fraction")
        assert resumed.verdict.steps == through.verdict.steps
        assert resumed.verdict.untrained == through.verdict.untrained
        assert bits(again) == bits(module)


def noticed(line: str) -> int:
    """The step at which the alert of a line in the log was noticed."""
    found = re.search(r" step (\d+)(?: \(noticed at (\d+)\))?: ", line)
    assert found is not None, line
    return int(found[2] or found[1])


def sampled(watch: GradWatch, statistic: str = "weight_norm") -> list[int]:
    """The steps at which `statistic` was sampled."""
    series = watch.history.series(statistic)
    return [step for step, norm in zip(watch.history.steps, series, strict=True) if norm == norm]


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
def test_checkpoints_of_lightnings_own(package: str, tmp_path: Path) -> None:
    plan = PLANS["spike"]
    through = watching()
    checkpoints = import_module(f"{package}.callbacks").ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=35, save_top_k=-1, filename="{step}"
    )
    fitted(package, plan, through, checkpoints, enable_checkpointing=True)
    found = sorted(tmp_path.glob("*.ckpt"))
    assert len(found) == 2
    for path in found:
        resumed = watching()
        fitted(package, plan, resumed, ckpt=path)
        assert list(map(incident, resumed.alerts)) == list(map(incident, through.alerts))


@pytest.mark.slow
def test_a_chain_of_stops(tmp_path: Path) -> None:
    """Each checkpoint comes from a run that was itself resumed; an alert does not wear off."""
    plan = PLANS["spike"]
    through = watching()
    fitted(PACKAGES[0], plan, through)
    ckpt = None
    for stop in plan.stops:
        resumed = watching()
        ckpt_before, ckpt = ckpt, tmp_path / f"{stop}.ckpt"
        fitted(PACKAGES[0], plan, resumed, saves(PACKAGES[0], tmp_path, (stop,)), ckpt=ckpt_before)
        assert list(map(incident, resumed.alerts)) == list(map(incident, through.alerts))


# ---- states that do not fit


@cache
def checkpoint_before_step_20() -> bytes:
    """Of the run that vanishes."""
    with TemporaryDirectory() as folder:
        fitted(PACKAGES[0], PLANS["vanishing"], watching(), saves(PACKAGES[0], Path(folder), (20,)))
        return Path(folder, "20.ckpt").read_bytes()


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> tuple[Path, Plan]:
    """A checkpoint of the run that vanishes, before step 20, after `change` to its callbacks' states."""
    path = folder / "20.ckpt"
    checkpoint = torch.load(BytesIO(checkpoint_before_step_20()), weights_only=True)
    change(checkpoint["callbacks"])
    torch.save(checkpoint, path)
    return path, PLANS["vanishing"]


def renamed(first: int) -> Callable[[dict[str, Any]], Any]:
    """The state of a model whose layers from the `first` on had other names."""

    def change(callbacks: dict[str, Any]) -> None:
        diagnosis = callbacks["GradWatch"]["diagnosis"]
        history = split_arrays(diagnosis["history"])
        known = {f"net.{i}" for i in range(first)}
        history["sites"] = [
            name if ".".join(name.split(".")[:2]) in known | {"total"} else f"old.{name}" for name in history["sites"]
        ]
        history["order"] = []
        diagnosis["history"] = join_arrays(history)

    return change


DECLINED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "version": (lambda callbacks: callbacks["GradWatch"]["diagnosis"].update(version=999), "version 999"),
    "no version": (lambda callbacks: callbacks["GradWatch"]["diagnosis"].pop("version"), "version None"),
    "another model": (renamed(6), "another model: it does not know 24 of the 33 layers and parameters"),
    "damaged history": (
        lambda callbacks: callbacks["GradWatch"]["diagnosis"]["history"].pop("text"),
        "the state is damaged: KeyError: 'text'",
    ),
    "damaged incidents": (
        lambda callbacks: callbacks["GradWatch"]["diagnosis"]["incidents"].update(open={"vanishing": 7}),
        "the state is damaged: IndexError",
    ),
    "damaged schedule": (
        lambda callbacks: callbacks["GradWatch"]["schedule"].update(interval=None),
        "the state is damaged: TypeError: interval=None: expected steps",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_declined_with_one_line(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the run is watched from there as one that begins anew."""
    change, words = DECLINED[name]
    path, plan = changed(tmp_path, change)
    announced(caplog)
    watch = watching(Log())
    fitted(PACKAGES[0], plan, watch, ckpt=path)
    declined, alert = announced(caplog)
    assert words in declined
    assert "declined" in declined
    assert alert.startswith("GradWatch WARNING step 20 (noticed at 22): vanishing in ")
    assert watch.history.steps == list(range(20, 50))
    assert sampled(watch)[:5] == list(range(20, 25))
    assert [alert.step for alert in watch.alerts] == [20]


def test_layers_are_found_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, plan = changed(tmp_path, renamed(16))
    announced(caplog)
    watch = watching(Log())
    fitted(PACKAGES[0], plan, watch, ckpt=path)
    assert announced(caplog) == []
    assert [alert.step for alert in watch.alerts] == [0]
    known, new = watch.history.series("grad_norm", "net.14"), watch.history.series("grad_norm", "net.20")
    assert (known == known).all()
    assert (new == new).tolist() == [False] * 20 + [True] * 30


def test_a_checkpoint_without_a_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, plan = changed(tmp_path, lambda callbacks: callbacks.clear())
    announced(caplog)
    watch = watching(Log())
    fitted(PACKAGES[0], plan, watch, ckpt=path)
    (alert,) = announced(caplog)
    assert alert.startswith("GradWatch WARNING step 20 (noticed at 22): vanishing in ")
    assert watch.history.steps == list(range(20, 50))


def test_a_checkpoint_with_a_state_and_no_one_watching(tmp_path: Path) -> None:
    path, plan = changed(tmp_path, lambda callbacks: None)
    alone = import_module(PACKAGES[0]).Callback()
    fitted(PACKAGES[0], plan, alone, ckpt=path)
