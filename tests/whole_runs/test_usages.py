"""Whatever people do with Lightning ends as it does without GradWatch: the same weights, metrics, files, errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from lightning.pytorch import callbacks

import quick
import usages_of_steps
import usages_of_trainer
from usage_runs import PACKAGES, LightningRun, Outcome, data, outcome_of
from usages import CORE, USAGES

assert "lbfgs" in USAGES, usages_of_steps
assert "barebones" in USAGES, usages_of_trainer

ELSEWHERE = [(name, PACKAGES[1], 1) for name in USAGES if name in CORE]
"""In the other package, and with the watch as the last callback."""
CASES = [
    *(pytest.param(name, PACKAGES[0], 0, marks=() if name in quick.USAGES else pytest.mark.slow) for name in USAGES),
    *(pytest.param(*case, marks=() if case[0] == "resumed" else pytest.mark.slow) for case in ELSEWHERE),
]
MEANT = {
    "early_stopping_on_nothing": "RuntimeError: Early stopping conditioned on metric `accuracy` which is not available",
    "checkpoint_on_exception": "ZeroDivisionError",
    "spike_detection": "TrainingSpikeException",
    "a misnamed option": "MisconfigurationException: `gradient_clip_algorithm`",
    "device_statistics": "" if find_spec("psutil") else "ModuleNotFoundError",
}
"""Usages that end with an error of the user's or of Lightning's."""
YOUNG = {"exponential_moving_average": "EMAWeightAveraging", "weight_averaging": "WeightAveraging"}
"""Usages of callbacks that lightning 2.4 does not have."""
MEANT |= {name: "AttributeError" for name, callback in YOUNG.items() if not hasattr(callbacks, callback)}


@cache
def bare(name: str, package: str) -> Outcome:
    with TemporaryDirectory() as folder:
        return outcome_of(USAGES[name], LightningRun(package, Path(folder), watched=False))


@pytest.mark.parametrize(("name", "package", "place"), CASES)
def test_ends_as_without(name: str, package: str, place: int, tmp_path: Path) -> None:
    without, run = bare(name, package), LightningRun(package, tmp_path, True, place)
    (error,) = without.errors
    assert error.startswith(MEANT.get(name, "")) if name in MEANT else not error, error
    assert outcome_of(USAGES[name], run) - without == {}
    for watch, trainer in zip(run.watches, run.trainers, strict=True):
        assert watch.verdict.notes == ()
        assert len(watch.history) > 0 or trainer.global_step == 0


@pytest.mark.parametrize("watched", [True, False], ids=["watched first", "watched later"])
def test_checkpoints_are_exchanged(watched: bool, tmp_path: Path) -> None:
    """A watched run's checkpoint is resumed without a watch, and an unwatched one's with a watch."""

    def usage(run: LightningRun) -> None:
        last = run.root / "last.ckpt"
        saving = run.get("callbacks.ModelCheckpoint")(dirpath=run.root, save_last=True)
        run.fit(saving, enable_checkpointing=True, max_epochs=1)
        assert torch.load(last, weights_only=True)["state_dict"]
        run.watched = run.root == watched_root and not run.watched
        run.trainer().fit(run.module(), data(shuffle=True), data(), ckpt_path=last)

    watched_root = tmp_path / "watched"
    watched_root.mkdir()
    without = outcome_of(usage, LightningRun(PACKAGES[0], tmp_path / "without", watched=False))
    difference = outcome_of(usage, LightningRun(PACKAGES[0], watched_root, watched)) - without
    said, _ = difference.pop("warnings", ([], []))
    assert difference == {}
    # Lightning's own remark on a callback that a checkpoint knows and the Trainer does not
    assert len(said) == watched
    assert all("callbacks used to create the checkpoint" in text and "GradWatch" in text for text in said)


def disturbances(run: LightningRun) -> dict[str, Callable[..., object]]:
    """What a callback might do to a training at its first step, and should not."""
    return {
        "weights": lambda _, module, *__: module.net[0].bias.data.add_(1e-7),
        "hooks": lambda _, module, *__: module.net[0].register_forward_hook(lambda *___: None),
        "random": lambda *_: torch.rand(()),
        "settings": lambda _, module, *__: module.net[0].bias.requires_grad_(False),
        "files": lambda *_: (run.root / "report.html").touch(),
        "warnings": lambda *_: warnings.warn("careful", stacklevel=1),
        "metrics": lambda _, module, *__: module.log("mine", 1.0),
        "counters": lambda trainer, *_: setattr(trainer, "should_stop", True),
        "errors": lambda *_: 1 / 0,
    }


@cache
def undisturbed() -> Outcome:
    with TemporaryDirectory() as folder:
        return outcome_of(lambda run: run.fit(), LightningRun(PACKAGES[0], Path(folder), watched=False))


@pytest.mark.parametrize("kind", disturbances(LightningRun(PACKAGES[0], Path(), watched=False)))
def test_every_disturbance_is_seen(kind: str, tmp_path: Path) -> None:
    """Every kind of disturbance shows as a difference of that kind."""

    def usage(run: LightningRun) -> None:
        disturb = disturbances(run)[kind]
        make = run.get("callbacks.LambdaCallback")
        run.fit(make(on_train_batch_end=lambda *args: disturb(*args) if args[-1] == 1 else None))

    assert kind in outcome_of(usage, LightningRun(PACKAGES[0], tmp_path, watched=False)) - undisturbed()
