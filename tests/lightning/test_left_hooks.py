"""A watch whose end no one announces: another callback raises in its `on_exception`, or ours is taken out in mid-run.

Lightning then calls no event of ours any more, and only the Trainer's state tells that such a fit is over. So hooks
that are left have to do nothing, and to remove themselves at the next backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from gradwatch import Clip, GradWatch, Watch
from gradwatch.sinks.memory import Memory
from modes import BATCHES, ModeModule, batch, quiet
from reference import bits, hooks_on
from training import quiet_trainer

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "watching": dict,
    "without signals": lambda: {"signals": "off"},
    "clipping in hooks": lambda: {"interventions": [Clip(1e-4, per="parameter", at="hook")]},
    "clipping signals": lambda: {"interventions": [Clip(1e-4, on="signal")]},
}


class Fails(ModeModule):
    def training_step(self, _: Any, batch_idx: int) -> Any:
        if batch_idx == BATCHES // 2:
            raise KeyError("no such batch")
        return super().training_step(_, batch_idx)


class RaisesToo(Callback):
    def on_exception(self, *_: Any) -> None:
        raise OSError("the disk is full")


class TakesOut(Callback):
    """Takes a callback out of the Trainer's list in the middle of the fit; `anew`: by a list without it."""

    def __init__(self, other: Callback, *, anew: bool = False) -> None:
        self._other, self._anew = other, anew

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._other in trainer.callbacks and trainer.global_step == 3:  # type: ignore[attr-defined]
            if self._anew:
                trainer.callbacks = [one for one in trainer.callbacks if one is not self._other]  # type: ignore[attr-defined]
            else:
                trainer.callbacks.remove(self._other)  # type: ignore[attr-defined]


def fit(module: pl.LightningModule, *callbacks: Callback) -> Any:
    with quiet():
        trainer = quiet_trainer(*callbacks)
        torch.manual_seed(1)
        try:
            trainer.fit(module, DataLoader(torch.arange(float(BATCHES)), batch_size=1))  # type: ignore[arg-type]
        except (KeyError, OSError):
            assert isinstance(module, Fails)
        return trainer


def train_on(model: nn.Module) -> None:
    """Two steps of a loop of the user's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        optimizer.zero_grad()
        (model(batch(seed)) * 100).square().mean().backward()
        optimizer.step()


def test_after_another_callback_has_raised_when_ours_was_called() -> None:
    module, memory = Fails(), Memory()
    trainer = fit(module, GradWatch(sinks=(memory,)), RaisesToo())
    assert hooks_on(module, *trainer.optimizers) == []
    assert memory.verdict is not None


@pytest.mark.parametrize("options", OPTIONS)
def test_after_another_callback_has_raised_before_ours_was_called(options: str) -> None:
    watched, alone = Fails(), Fails()
    trainer = fit(watched, RaisesToo(), GradWatch(sinks=(), **OPTIONS[options]()))
    fit(alone, RaisesToo())
    alone.load_state_dict(watched.state_dict())
    for module in (watched, alone):  # the user goes on with the model as it is
        train_on(module.model)
    assert bits(watched) == bits(alone)
    assert hooks_on(watched, *trainer.optimizers) == []


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_taken_out_in_the_middle_of_a_fit(options: str, anew: bool) -> None:
    memory, module = Memory(), ModeModule()
    watch = GradWatch(sinks=(memory,), **OPTIONS[options]())
    trainer = fit(module, TakesOut(watch, anew=anew), watch)
    assert trainer.state.finished
    assert hooks_on(module, *trainer.optimizers) == []
    assert memory.verdict is not None, "the sinks are closed"
    assert len(memory.records) == 3


def test_taken_out_in_the_middle_of_a_fit_that_fails() -> None:
    watch, module = GradWatch(sinks=()), Fails()
    trainer = fit(module, TakesOut(watch), watch)
    assert hooks_on(module, *trainer.optimizers) == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_overhead_of_a_fit_that_is_over_stays(fails: bool) -> None:
    watch = GradWatch(sinks=())
    fit(Fails() if fails else ModeModule(), watch)
    at_the_end = watch.overhead
    time.sleep(0.01)
    assert 0 < watch.overhead == at_the_end


def test_the_overhead_of_a_loop_that_is_over_stays() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Watch(model, sinks=()) as watch:
        model(torch.ones(1, 2)).sum().backward()
        watch.step(optimizer)
        optimizer.step()
    at_the_end = watch.overhead
    time.sleep(0.01)
    assert 0 < watch.overhead == at_the_end
