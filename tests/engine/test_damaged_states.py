"""A state that is not what was saved is taken or declined with one line, and the run is watched."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from io import BytesIO
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from damaged_files import damaged_content
from gradwatch import Clip, GradWatch, SkipNonFinite, SpikeClip
from gradwatch.engine.joined_arrays import join_arrays, split_arrays
from gradwatch.sinks.log import Log
from models import module_of
from quick import cases
from reference import bits, hooks_on
from training import quiet_trainer

STEPS = 6
SHARES = 4


class Restores(pl.Callback):
    """Gives a watch its state when the Trainer does."""

    def __init__(self, watch: GradWatch, state: dict[str, Any]) -> None:
        self.watch, self.state = watch, state

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.watch.load_state_dict(self.state)


def fitted(state: Any = None, *, nan_at: int = -1) -> tuple[dict[str, bytes], GradWatch]:
    """The weights after a short fit, that begins with `state`."""
    torch.manual_seed(0)
    watch = GradWatch(sinks=[Log()], interventions=[Clip(0.01), SpikeClip(dry_run=True), SkipNonFinite()])
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    module = module_of(
        net, lambda net, batch, step: net(batch).square().mean() * (float("nan") if step == nan_at else 1), lr=0.1
    )
    trainer = quiet_trainer(watch, *([] if state is None else [Restores(watch, state)]))
    trainer.fit(module, DataLoader(torch.randn(STEPS, 3), batch_size=None))
    assert hooks_on(module, *trainer.optimizers) == []
    return bits(module), watch


@cache
def saved() -> bytes:
    """The state of a fit with an incident."""
    _, watch = fitted(nan_at=3)
    assert len(watch.alerts) == 1
    file = BytesIO()
    torch.save(watch.state_dict(), file)
    return file.getvalue()


@cache
def weights() -> dict[str, bytes]:
    return fitted()[0]


def tried(number: int, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the state was declined."""
    state, rng = whole(), random.Random(number)
    damaged = damaged_content(state, rng) if number % 2 else with_another_history(state, rng)
    return taken_or_declined(damaged, caplog, number)


def with_another_history(state: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One of whose history a part is another one, as far as JSON has it."""
    history = split_arrays(state["diagnosis"]["history"])
    while True:
        with suppress(TypeError, ValueError, RecursionError):
            damaged = damaged_content(exchanged(history, np.ndarray, torch.from_numpy), rng)
            state["diagnosis"]["history"] = join_arrays(exchanged(damaged, torch.Tensor, np.asarray))
            return state


def exchanged(tree: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    """`tree` with `new` of all that is of that kind."""
    if isinstance(tree, kind):
        return new(tree)
    return {key: exchanged(value, kind, new) for key, value in tree.items()} if isinstance(tree, dict) else tree


def whole() -> Any:
    return torch.load(BytesIO(saved()), weights_only=True)


def taken_or_declined(state: Any, caplog: pytest.LogCaptureFixture, number: object) -> bool:
    caplog.clear()
    found, watch = fitted(state)
    assert found == weights(), number
    assert watch.history.steps[-STEPS:] == list(range(STEPS)), number
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    declined = [line for line in lines if "declined" in line or "damaged" in line]
    assert not any("failed" in text for text in (*lines, *watch.verdict.notes)), number
    assert len(declined) <= 2, number
    assert all("\n" not in line and len(line) < 500 for line in declined), number
    return bool(declined)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("share", cases(range(SHARES), (0, 1)))
def test_states_with_another_thing_in_them(share: int, caplog: pytest.LogCaptureFixture) -> None:
    assert sum(tried(number, caplog) for number in range(share, 40, SHARES))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("state", [3, "state", [], [1], torch.ones(3), {"begun": None}, {1: 2}], ids=repr)
def test_what_is_no_state(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert taken_or_declined(state, caplog, state)


@pytest.mark.usefixtures("quiet")
def test_the_whole_state_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    assert not taken_or_declined(whole(), caplog, "whole")


@pytest.mark.usefixtures("quiet")
def test_a_state_for_layers_that_come_with_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    """It waits for them, and is declined then."""
    state = whole()
    state["diagnosis"]["history"]["text"] = 3
    watch = GradWatch(sinks=())
    module = module_of(nn.LazyLinear(1), lambda net, batch, _: net(batch).square().mean(), lr=0.1)
    quiet_trainer(watch, Restores(watch, state)).fit(module, DataLoader(torch.randn(STEPS, 3), batch_size=None))
    assert watch.verdict.notes == ()
    assert len(watch.history) == STEPS
    assert "declined the state in the checkpoint and starts anew: the state is damaged" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("share", range(SHARES))
def test_more_states_with_another_thing_in_them(share: int, caplog: pytest.LogCaptureFixture) -> None:
    assert sum(tried(number, caplog) for number in range(40 + share, 80, SHARES))
