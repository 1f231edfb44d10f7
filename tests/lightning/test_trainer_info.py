"""What a Trainer says of its run: where GradWatch refuses, what a batch holds, what callbacks can monitor."""

from __future__ import annotations

import logging
import warnings
from collections import UserDict
from dataclasses import make_dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader

import ranks
from gradwatch import GradWatch
from gradwatch.lightning.trainer_info import (
    LONGEST_VALUE,
    MAX_VALUES,
    clip_algorithm_of,
    examples_in,
    is_monitored,
    run_description,
    training_mode_of,
)
from modes import BATCHES, ModeModule, quiet
from reference import bits, hooks_on
from training import quiet_trainer

LOADER = DataLoader(torch.arange(float(BATCHES)), batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FSDPStrategy", "ModelParallelStrategy"),
        ("DeepSpeedStrategy", "keeps the gradients to itself"),
        ("XLAStrategy", "recompile"),
    ],
)
def test_what_cannot_be_measured_is_refused(name: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """By the strategy's name, also of a strategy made from it: one line, and nothing attached."""
    base = type(name, (SingleDeviceStrategy,), {})
    strategy = type("Mine", (base,), {})(device="cpu")
    watch, watched, alone = GradWatch(), ModeModule(), ModeModule()
    seen: list[str] = []
    watched.on_train_batch_end = lambda *_: seen.extend(hooks_on(watched, *watched.trainer.optimizers))
    with quiet(), caplog.at_level(logging.DEBUG, "gradwatch"):
        quiet_trainer(watch, strategy=strategy).fit(watched, LOADER)
        quiet_trainer().fit(alone, LOADER)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gradwatch"]
    assert line.startswith(
        f"GradWatch does not watch this run: under {name} the optimizer's gradients cannot be measured"
    )
    assert reason in line
    assert watch.verdict.notes == (line,)
    assert str(watch.verdict) == f"GradWatch: no step was measured.\nNote: {line}"
    assert len(watch.history) == 0
    assert seen == []
    assert bits(watched) == bits(alone)


def test_a_model_without_parameters_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Empty(pl.LightningModule):
        def training_step(self, batch: object, batch_idx: int) -> None:
            return None

        def configure_optimizers(self) -> None:
            return None

    watch = GradWatch()
    with quiet(), warnings.catch_warnings(), caplog.at_level(logging.DEBUG, "gradwatch"):
        warnings.simplefilter("ignore")
        quiet_trainer(watch).fit(Empty(), LOADER)
    (note,) = watch.verdict.notes
    assert note == "GradWatch does not watch this run: its model has no parameters, and so no gradients"
    assert [record.getMessage() for record in caplog.records if record.name == "gradwatch"] == [note]


@pytest.mark.parametrize(
    ("batch", "examples"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ({"text": ["a", "b"], "ids": torch.zeros(2, 7)}, 2),
        (UserDict(ids=torch.zeros(3, 7)), 3),
        ((0, {"x": (None, torch.zeros(6))}), 6),
        (make_dataclass("Graphs", ["name", "nodes"])("a", torch.zeros(8, 2)), 8),
        (torch.zeros(()), 0),
        (["a", 1, None], 0),
        ([[[[[torch.zeros(3)]]]]], 0),
        ([0] * 1000 + [torch.zeros(3)], 0),
        (None, 0),
    ],
)
def test_examples_in_a_batch(batch: Any, examples: int) -> None:
    assert examples_in(batch) == examples


def test_a_batch_of_the_users_own_making_does_no_harm() -> None:
    class Odd(UserDict[str, Any]):
        def values(self) -> Any:
            raise RuntimeError("not now")

    assert examples_in(Odd()) == 0
    ring: list[Any] = []
    ring.append(ring)
    assert examples_in(ring) == 0


class Stopping(ModeModule):
    def on_fit_end(self) -> None:
        self.seen = sorted(key for key in self.trainer.callback_metrics if key.startswith("gradwatch/"))


def stopped(several: bool) -> dict[str, Any]:
    """EarlyStopping with one of our numbers, which does not shrink for long."""
    more = {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": ranks.SIZE} if several else {}
    module = Stopping()
    patient = EarlyStopping("gradwatch/alerts", patience=2, check_on_train_epoch_end=True)
    with quiet():
        trainer = quiet_trainer(patient, GradWatch(), max_epochs=9, **more)
        trainer.fit(module, LOADER)
    return {"epochs": trainer.current_epoch, "seen": module.seen}


def test_early_stopping_can_monitor_our_numbers() -> None:
    reported = stopped(several=False)
    assert reported["epochs"] == 3
    assert {"gradwatch/alerts", "gradwatch/grad_norm_log10_total"} <= set(reported["seen"])


@pytest.mark.parametrize(
    ("callback", "monitored"),
    [
        (EarlyStopping("gradwatch/alerts"), True),
        (ModelCheckpoint(filename="{gradwatch/alerts}"), True),
        (ModelCheckpoint(monitor="val_loss", filename="{val_loss}"), False),
    ],
)
def test_which_callbacks_need_our_numbers_at_every_step(callback: Callback, monitored: bool) -> None:
    assert is_monitored(quiet_trainer(callback, enable_checkpointing=True)) is monitored


@pytest.mark.slow
def test_early_stopping_can_monitor_our_numbers_on_every_rank() -> None:
    """It looks at them on each, and raises where one has none."""
    first, second = ranks.run(stopped, True)
    assert first == second
    assert first["epochs"] == 3


def test_hyperparameters_that_are_one_value_are_settings_of_the_run() -> None:
    class Configured(ModeModule):
        def __init__(self, **values: object) -> None:
            super().__init__()
            self.save_hyperparameters(dict(values))

    watch = GradWatch()
    many = {f"value{i}": i for i in range(100)}
    module = Configured(lr=0.1, name="x" * 999, fast=True, layers=[1, 2], loss=torch.relu, **many)
    with quiet():
        trainer = quiet_trainer(watch)
        trainer.fit(module, LOADER)
    own = {name: text for name, text in described(trainer).items() if name.startswith("hparams.")}
    assert len(own) == MAX_VALUES
    assert own["hparams.lr"] == "0.1"
    assert own["hparams.fast"] == "True"
    assert own["hparams.name"] == "x" * LONGEST_VALUE
    assert not {"hparams.layers", "hparams.loss"} & set(own)
    assert not [name for name in described(quiet_trainer_of(ModeModule())) if name.startswith("hparams.")]


def test_clipping_and_accumulation_are_settings_of_the_run() -> None:
    """`gradwatch compare` names them where they differ."""
    with quiet():
        trainer = quiet_trainer(GradWatch(), gradient_clip_val=0.5, accumulate_grad_batches=2)
        trainer.fit(ModeModule(), LOADER)  # its own clipping calls the Trainer's
    of_run = described(trainer)
    assert (of_run["gradient_clip_val"], of_run["accumulate_grad_batches"]) == ("0.5 by norm", "2")
    assert of_run["configure_gradient_clipping"] == "the model's own"
    plain = quiet_trainer_of(ModeModule())
    plain.lightning_module.configure_gradient_clipping = super(
        ModeModule, plain.lightning_module
    ).configure_gradient_clipping
    assert of_run.keys() - described(plain).keys() == {
        "gradient_clip_val",
        "accumulate_grad_batches",
        "configure_gradient_clipping",
    }


@pytest.mark.parametrize(
    ("schedule", "norms", "setting"),
    [
        ({1: 3, 2: 2}, "gradient norms accumulated up to x3, before", "up to 3"),
        ({0: 4}, "gradient norms accumulated x4, before", "4"),
        ({0: 1}, "gradient norms before", None),
    ],
)
def test_a_schedule_of_accumulation_is_said_as_it_is(
    schedule: dict[int, int], norms: str, setting: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with quiet(), caplog.at_level("INFO", logger="gradwatch"):
        trainer = quiet_trainer(GradWatch(), GradientAccumulationScheduler(schedule))
        trainer.fit(ModeModule(), LOADER)
    assert norms in caplog.text
    assert described(trainer).get("accumulate_grad_batches") == setting


def described(trainer: Any) -> dict[str, str]:
    return run_description(trainer, training_mode_of(trainer))


def quiet_trainer_of(module: ModeModule) -> Any:
    with quiet():
        trainer = quiet_trainer()
        trainer.fit(module, LOADER)
    return trainer


@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
def test_the_word_for_clipping(algorithm: str | None) -> None:
    trainer = pl.Trainer(gradient_clip_val=0.5, gradient_clip_algorithm=algorithm, logger=False)
    assert clip_algorithm_of(trainer) == (algorithm or "norm")
