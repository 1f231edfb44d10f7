"""Wherever a training fails, the same exception comes out as without GradWatch, and nothing is left on the model."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import isfunction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import quick
from gradwatch import GradWatch
from reference import hooks_on
from training import quiet_trainer
from usage_runs import OURS, PACKAGES, LitOfLightning, Outcome, Stage, data, play, quiet
from usages import USAGES

ERRORS = {error.__name__: error for error in (ZeroDivisionError, KeyboardInterrupt)}
EVENTS = [name for name, value in vars(pl.Callback).items() if isfunction(value) and not name.startswith("_")]
LATER = 2
"""At which of its calls a place fails, where it is called as often."""


class Tripwire:
    """Fails at the call `number` of what it is told of as `place`; counts the calls of every place."""

    def __init__(self, place: str, number: int, error: type[BaseException] = ZeroDivisionError) -> None:
        self.place, self.number, self.error = place, number, error
        self.calls: Counter[str] = Counter()
        self.armed = True

    def __call__(self, place: str) -> None:
        self.calls[place] += self.armed
        if self.armed and place == self.place and self.calls[place] == self.number:
            raise self.error(f"planned in {place}")


def saboteur(wire: Tripwire) -> pl.Callback:
    """A callback that tells `wire` of every event."""

    def heard(name: str) -> Callable[..., object]:
        def event(*_: object, **__: object) -> object:
            wire(name)
            return {"something": 1} if name == "state_dict" else None

        return event

    return type("Saboteur", (pl.Callback,), {name: staticmethod(heard(name)) for name in EVENTS})()


def whole_life(stage: Stage, wire: Tripwire) -> None:
    """Every event there is: a fit resumed from a checkpoint, validation, test, prediction; then a fit once more."""
    callback, module, last = saboteur(wire), stage.module(), stage.root / "last.ckpt"
    saving = {"enable_checkpointing": True, "limit_train_batches": 2, "limit_val_batches": 1}
    checkpoint = partial(stage.get("callbacks.ModelCheckpoint"), dirpath=stage.root, save_last=True)
    wire.armed = False
    stage.fit(callback, checkpoint(), module=module, max_epochs=1, **saving)
    wire.armed = True
    trainer = stage.trainer(callback, checkpoint(), max_epochs=3, **saving)
    stage.attempt(lambda: trainer.fit(module, data(), data(), ckpt_path=last))
    for act in (trainer.validate, trainer.test, trainer.predict):
        if act.__name__ in wire.place or wire.place in ("", "setup", "teardown"):
            stage.attempt(partial(act, module, data(batches=LATER)))
    if wire.place == "on_exception":
        module.on_train_batch_end = lambda *_: 1 / 0
        stage.attempt(lambda: stage.fit(callback, module=module))
        del module.on_train_batch_end
    wire.armed = False
    stage.fit(module=module, max_epochs=1)


def lived(event: str, number: int, error: type[BaseException], stage: Stage) -> Outcome:
    return play(lambda stage: whole_life(stage, Tripwire(event, number, error)), stage)


@cache
def rehearsed() -> Counter[str]:
    """How often each event is called where nothing fails."""
    wire = Tripwire("", 0)
    with TemporaryDirectory() as folder, quiet():
        whole_life(Stage(PACKAGES[0], Path(folder), watched=False), wire)
    return wire.calls


@cache
def without(event: str, number: int, error: type[BaseException]) -> Outcome:
    with TemporaryDirectory() as folder:
        return lived(event, number, error, Stage(PACKAGES[0], Path(folder), watched=False))


def test_every_event_is_rehearsed() -> None:
    assert set(EVENTS) - set(rehearsed()) == {"on_exception"}
    assert set(quick.EVENTS) <= set(EVENTS)
    assert set(quick.PLACES) <= set(PLACES)


@pytest.mark.parametrize(
    ("place", "error"), [(0, "ZeroDivisionError"), (1, "KeyboardInterrupt")], ids=["watch first", "watch last"]
)
@pytest.mark.parametrize("event", quick.cases(EVENTS, quick.EVENTS))
def test_a_callback_fails(event: str, place: int, error: str, tmp_path: Path) -> None:
    if (event, place) == ("on_exception", 1):
        pytest.skip("Lightning then calls no further callback's: hooks stay until the next fit (docs/modes.md)")
    number = max(1, min(LATER, rehearsed()[event]))
    bare = without(event, number, ERRORS[error])
    assert f"planned in {event}" in str(bare.errors) or "SystemExit: 1" in bare.errors
    stage = Stage(PACKAGES[0], tmp_path, watched=True, place=place, one=True)
    assert lived(event, number, ERRORS[error], stage) - bare == {}
    watch = stage.watches[0]
    assert (len(watch.history), watch.verdict.notes) == (5, ()), "the watch is as good as new"


# ---- inside the training itself


class Failing(torch.autograd.Function):
    """The identity; fails in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Tripwire) -> torch.Tensor:
        ctx.wire = wire
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.wire("backward")
        return gradient, None


class Wired(nn.Module):
    """The identity; fails in the forward pass or the backward pass, in the middle of the net."""

    def __init__(self, wire: Tripwire) -> None:
        super().__init__()
        self.wire = wire

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wire("forward")
        return Failing.apply(x, self.wire)


METHODS = (
    "training_step",
    "validation_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "configure_optimizers",
    "transfer_batch_to_device",
    "setup",
    "on_save_checkpoint",
)
"""Methods of a LightningModule at which a training may fail."""
PLACES = (*METHODS, "forward", "backward", "optimizer.step", "loader", "logger", "closure")
FEW = {"setup": 1, "configure_optimizers": 1, "on_save_checkpoint": 2, "lr_scheduler_step": 2}
"""How often a fit comes to a place, where that is less than seven times."""


def fails_within(stage: Stage, wire: Tripwire) -> None:
    """A fit that fails at the wire's place, and once more the same without."""
    wire.armed = False
    net = nn.Sequential(nn.Linear(32, 512), nn.ReLU(inplace=True), Wired(wire), nn.Linear(512, 2))
    module = stage.module(net=net)
    for method in METHODS:
        setattr(module, method, _told(wire, method, getattr(module, method)))
    made = module.configure_optimizers

    def configure_optimizers() -> Any:
        optimizers, schedulers = made()
        optimizers[0].register_step_pre_hook(lambda *_: wire("optimizer.step"))
        return optimizers, schedulers

    def loader() -> Iterator[Any]:
        for batch in data():
            wire("loader")
            yield batch

    def zero_grad(*_: Any, **__: Any) -> None:
        wire("closure")

    module.configure_optimizers = configure_optimizers
    module.on_before_zero_grad = zero_grad
    module.train_dataloader = lambda: _Again(loader)
    logger = stage.get("loggers.CSVLogger")(stage.root)
    log_metrics = logger.log_metrics

    def logged(metrics: dict[str, Any], step: int) -> None:
        if not any(OURS.match(key) for key in metrics):
            wire("logger")
        log_metrics(metrics, step)

    logger.log_metrics = logged
    more = {"logger": logger, "enable_checkpointing": True, "gradient_clip_val": 0.1, "max_epochs": 3}
    wire.armed = True
    stage.attempt(lambda: stage.trainer(**more).fit(module, val_dataloaders=data(batches=2)))
    wire.armed = False
    stage.trainer(max_epochs=2).fit(module)


class _Again:
    """An iterable that can be gone through again."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def _told(wire: Tripwire, place: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        wire(place)
        return method(*args, **kwargs)

    return call


@pytest.mark.parametrize(("number", "error"), [(2, "KeyboardInterrupt"), (7, "ZeroDivisionError")])
@pytest.mark.parametrize("place", quick.cases(PLACES, quick.PLACES))
def test_the_training_fails(place: str, number: int, error: str, tmp_path: Path) -> None:
    number = min(number, FEW.get(place, number))
    bare_stage, stage = (
        Stage(PACKAGES[0], tmp_path / name, watched=bool(name), one=True, place=number % 2) for name in ("", "watched")
    )
    stage.root.mkdir()
    bare = play(lambda stage: fails_within(stage, Tripwire(place, number, ERRORS[error])), bare_stage)
    assert f"planned in {place}" in str(bare.errors) or "SystemExit: 1" in bare.errors
    assert play(lambda stage: fails_within(stage, Tripwire(place, number, ERRORS[error])), stage) - bare == {}
    assert (len(stage.watches[0].history), stage.watches[0].verdict.notes) == (10, ())


PARTS = (
    *(f"gradwatch.lightning.callback.{name}" for name in ("mode_of", "refusal", "default_sinks")),
    *(f"gradwatch.lightning.trainer_info.{name}" for name in ("axis_of", "scaler_of", "Moment")),
    *(f"gradwatch.engine.engine.Engine.{name}" for name in ("state_dict", "load_state_dict")),
    "gradwatch.engine.diagnosis.Diagnosis.close",
    "gradwatch.measure.modules.output_statistics._measure",
)
"""What is called at the Trainer's events and in its hooks: any of it may go wrong one day, in another's release."""


@pytest.mark.parametrize("part", PARTS)
def test_what_is_ours_fails(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training, its checkpoints and its resumption go on as without."""
    bare_stage, stage = (Stage(PACKAGES[0], tmp_path / name, watched=bool(name)) for name in ("", "watched"))
    stage.root.mkdir()
    without = play(USAGES["resumed"], bare_stage)
    calls: list[object] = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        raise ZeroDivisionError("planned")

    monkeypatch.setattr(part, fails)
    assert play(USAGES["resumed"], stage) - without == {}
    assert calls


def test_a_model_is_freed_after_an_exception() -> None:
    watch, module = GradWatch(), LitOfLightning()
    module.on_train_batch_end = lambda *_: 1 / 0
    trainer = quiet_trainer(watch)
    with quiet():
        try:
            trainer.fit(module, data())
        except ZeroDivisionError:
            failed = True
    assert failed
    assert hooks_on(module, *trainer.optimizers) == []
    gone = weakref.ref(module)
    del module, trainer
    gc.collect()
    assert gone() is None
    assert len(watch.history) == 1
