"""Wherever a training fails, the same exception comes out as without GradWatch, and nothing is left on the model."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import isfunction
from itertools import cycle
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
from usage_runs import OURS, PACKAGES, LightningRun, LitOfLightning, Outcome, data, outcome_of, quiet
from usages import USAGES

ERRORS = {error.__name__: error for error in (ZeroDivisionError, KeyboardInterrupt)}
EVENTS = [name for name, value in vars(pl.Callback).items() if isfunction(value) and not name.startswith("_")]
LATER = 2
"""At which of its calls a place fails, where it is called as often."""
SHORT = {"limit_train_batches": 2, "limit_val_batches": 1}


class FailureAt:
    """Raises `error` at call `number` of `place`; counts the calls of every place."""

    def __init__(self, place: str, number: int, error: type[BaseException] = ZeroDivisionError) -> None:
        self.place, self.number, self.error = place, number, error
        self.calls: Counter[str] = Counter()
        self.armed = True

    def __call__(self, place: str) -> None:
        self.calls[place] += self.armed
        if self.armed and place == self.place and self.calls[place] == self.number:
            raise self.error(f"planned in {place}")


def failing_callback(failure: FailureAt) -> pl.Callback:
    """A callback that calls `failure` at every event."""

    def failing(name: str) -> Callable[..., object]:
        def event(*_: object, **__: object) -> object:
            failure(name)
            return {"something": 1} if name == "state_dict" else None

        return event

    return type("FailingCallback", (pl.Callback,), {name: staticmethod(failing(name)) for name in EVENTS})()


@cache
def checkpoint_of_an_epoch(watched: bool) -> bytes:
    def usage(run: LightningRun) -> None:
        trainer = run.fit(failing_callback(FailureAt("", 0)), max_epochs=1, **SHORT)
        trainer.save_checkpoint(run.root / "saved.ckpt")

    with TemporaryDirectory() as folder:
        outcome_of(usage, LightningRun(PACKAGES[0], Path(folder), watched=watched))
        return Path(folder, "saved.ckpt").read_bytes()


def every_event(run: LightningRun, failure: FailureAt, saved: bytes) -> None:
    """Every event there is: a fit resumed from a checkpoint, validation, test, prediction; then a fit once more."""
    callback, module, last = failing_callback(failure), run.module(), run.root / "last.ckpt"
    last.write_bytes(saved)
    saving = run.get("callbacks.ModelCheckpoint")(dirpath=run.root, save_last=True)
    trainer = run.trainer(callback, saving, max_epochs=3, enable_checkpointing=True, **SHORT)
    run.attempt(lambda: trainer.fit(module, data(), data(), ckpt_path=last))
    for act in (trainer.validate, trainer.test, trainer.predict):
        if act.__name__ in failure.place or failure.place in ("", "setup", "teardown"):
            run.attempt(partial(act, module, data(batches=LATER)))
    if failure.place == "on_exception":
        module.on_train_batch_end = lambda *_: 1 / 0
        run.attempt(lambda: run.fit(callback, module=module))
        del module.on_train_batch_end
    failure.armed = False
    run.fit(module=module, max_epochs=1)


def outcome_with_failure(event: str, number: int, error: type[BaseException], run: LightningRun) -> Outcome:
    saved = checkpoint_of_an_epoch(run.watched)
    return outcome_of(lambda run: every_event(run, FailureAt(event, number, error), saved), run)


@cache
def calls_without_failure() -> Counter[str]:
    """How often each event is called where nothing fails."""
    failure = FailureAt("", 0)
    with TemporaryDirectory() as folder, quiet():
        every_event(LightningRun(PACKAGES[0], Path(folder), watched=False), failure, checkpoint_of_an_epoch(False))
    return failure.calls


@cache
def without(event: str, number: int, error: type[BaseException]) -> Outcome:
    with TemporaryDirectory() as folder:
        return outcome_with_failure(event, number, error, LightningRun(PACKAGES[0], Path(folder), watched=False))


def test_every_event_is_called() -> None:
    assert set(EVENTS) - set(calls_without_failure()) == {"on_exception"}
    assert set(quick.EVENTS) <= set(EVENTS)
    assert set(quick.PLACES) <= set(PLACES)


def failing_events() -> Iterator[Any]:
    """Event, error, and the watch's place before or behind it: both where the watch has that event, too."""
    for number, (event, error) in enumerate(zip(EVENTS, cycle(ERRORS), strict=False)):
        for place, name in enumerate(("watch first", "watch last")):
            if event in vars(GradWatch) or place == number // 2 % 2:
                marks = () if event in quick.EVENTS else pytest.mark.slow
                yield pytest.param(event, place, error, id=f"{event}-{name}", marks=marks)


@pytest.mark.parametrize(("event", "place", "error"), [*failing_events()])
def test_a_callback_fails(event: str, place: int, error: str, tmp_path: Path) -> None:
    if (event, place) == ("on_exception", 1):
        pytest.skip(
            "Lightning then calls no further callback's: hooks stay until the next backward pass (docs/modes.md)"
        )
    number = max(1, min(LATER, calls_without_failure()[event]))
    bare = without(event, number, ERRORS[error])
    assert f"planned in {event}" in str(bare.errors) or "SystemExit: 1" in bare.errors
    run = LightningRun(PACKAGES[0], tmp_path, watched=True, place=place, one=True)
    assert outcome_with_failure(event, number, ERRORS[error], run) - bare == {}
    watch = run.watches[0]
    assert (len(watch.history), watch.verdict.notes) == (5, ()), "the watch is as good as new"


# ---- inside the training itself


class Failing(torch.autograd.Function):
    """The identity; fails in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, failure: FailureAt) -> torch.Tensor:
        ctx.failure = failure
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.failure("backward")
        return gradient, None


class FailingModule(nn.Module):
    """The identity; fails in the forward pass or the backward pass, in the middle of the net."""

    def __init__(self, failure: FailureAt) -> None:
        super().__init__()
        self.failure = failure

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.failure("forward")
        return Failing.apply(x, self.failure)


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


def fails_within(run: LightningRun, failure: FailureAt) -> None:
    """A fit that fails at the place of `failure`, and then the same without failure."""
    failure.armed = False
    net = nn.Sequential(nn.Linear(32, 512), nn.ReLU(inplace=True), FailingModule(failure), nn.Linear(512, 2))
    module = run.module(net=net)
    for method in METHODS:
        setattr(module, method, _with_failure(failure, method, getattr(module, method)))
    made = module.configure_optimizers

    def configure_optimizers() -> Any:
        optimizers, schedulers = made()
        optimizers[0].register_step_pre_hook(lambda *_: failure("optimizer.step"))
        return optimizers, schedulers

    def loader() -> Iterator[Any]:
        for batch in data():
            failure("loader")
            yield batch

    def zero_grad(*_: Any, **__: Any) -> None:
        failure("closure")

    module.configure_optimizers = configure_optimizers
    module.on_before_zero_grad = zero_grad
    module.train_dataloader = lambda: _Again(loader)
    logger = run.get("loggers.CSVLogger")(run.root)
    log_metrics = logger.log_metrics

    def logged(metrics: dict[str, Any], step: int) -> None:
        if not any(OURS.match(key) for key in metrics):
            failure("logger")
        log_metrics(metrics, step)

    logger.log_metrics = logged
    more = {"logger": logger, "enable_checkpointing": True, "gradient_clip_val": 0.1, "max_epochs": 3}
    failure.armed = True
    run.attempt(lambda: run.trainer(**more).fit(module, val_dataloaders=data(batches=2)))
    failure.armed = False
    run.trainer(max_epochs=2).fit(module)


class _Again:
    """An iterable that can be gone through again."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def _with_failure(failure: FailureAt, place: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        failure(place)
        return method(*args, **kwargs)

    return call


def failing_places() -> Iterator[Any]:
    """Place, number of the call, error: both ways to fail by turns, and at the places of the quick run each of them."""
    ways = (2, "KeyboardInterrupt"), (7, "ZeroDivisionError")
    for turn, place in enumerate(PLACES):
        few = place in quick.PLACES
        for way in ways if few else [ways[turn % 2]]:
            yield pytest.param(place, *way, marks=() if few else pytest.mark.slow)


@pytest.mark.parametrize(("place", "number", "error"), [*failing_places()])
def test_the_training_fails(place: str, number: int, error: str, tmp_path: Path) -> None:
    number = min(number, FEW.get(place, number))
    bare_run, run = (
        LightningRun(PACKAGES[0], tmp_path / name, watched=bool(name), one=True, place=number % 2)
        for name in ("", "watched")
    )
    run.root.mkdir()
    bare = outcome_of(lambda run: fails_within(run, FailureAt(place, number, ERRORS[error])), bare_run)
    assert f"planned in {place}" in str(bare.errors) or "SystemExit: 1" in bare.errors
    assert outcome_of(lambda run: fails_within(run, FailureAt(place, number, ERRORS[error])), run) - bare == {}
    assert (len(run.watches[0].history), run.watches[0].verdict.notes) == (10, ())


PARTS = (
    *(
        f"gradwatch.lightning.callback.{name}"
        for name in ("training_mode_of", "refusal", "default_sinks", "step_info_of")
    ),
    *(f"gradwatch.lightning.trainer_info.{name}" for name in ("scaler_of", "StepInfo")),
    *(f"gradwatch.engine.engine.Engine.{name}" for name in ("state_dict", "load_state_dict")),
    "gradwatch.engine.diagnosis.Diagnosis.close",
    "gradwatch.measure.modules.output_statistics._measure",
)
"""What is called at the Trainer's events and in its hooks: any of it may go wrong one day, in another's release."""


@cache
def resumed_without() -> Outcome:
    with TemporaryDirectory() as folder:
        return outcome_of(USAGES["resumed"], LightningRun(PACKAGES[0], Path(folder), watched=False))


@pytest.mark.parametrize("part", PARTS)
def test_what_is_ours_fails(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training, its checkpoints and its resumption go on as without."""
    run = LightningRun(PACKAGES[0], tmp_path, watched=True)
    calls: list[object] = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        raise ZeroDivisionError("planned")

    monkeypatch.setattr(part, fails)
    assert outcome_of(USAGES["resumed"], run) - resumed_without() == {}
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
