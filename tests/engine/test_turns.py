"""Several optimizers: each has its own first samples, in whatever order they step, also after a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradwatch import GradWatch, Watch
from gradwatch.core.schedule import EARLY_STEPS, FIRST_STEPS
from gradwatch.measure.optimizer_steps import OptimizerSteps, WatchedOptimizer
from gradwatch.sinks.memory import Memory
from training import quiet_trainer

pytestmark = pytest.mark.usefixtures("quiet")

SAMPLED = {*range(FIRST_STEPS), *EARLY_STEPS}


class Players:
    """Two parts of a model, each with its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in self.parts]
        self.memory = Memory()
        self.watch = Watch(self.parts, sinks=(self.memory,), budget=1e-6)

    def play(self, turns: Sequence[int]) -> None:
        """`turns`: whose step it is, one after the other."""
        for turn in turns:
            optimizer = self.optimizers[turn]
            optimizer.zero_grad()
            self.parts[turn](torch.ones(2, 4)).square().mean().backward()
            self.watch.step(optimizer)
            optimizer.step()

    def sampled(self, turn: int) -> list[int]:
        """Which of its own steps were sampled."""
        own = [record for record in self.memory.records if record.optimizer == turn]
        return [index for index, record in enumerate(own) if "weight_norm" in record.fresh]


@pytest.mark.parametrize("round_", [[0, 1], [0, 0, 1], [0, 0, 0, 0, 0, 1], [0, 1, 1]], ids=str)
def test_each_has_its_own_first_samples(round_: list[int]) -> None:
    """The order is not known in the first round only."""
    players = Players()
    with players.watch:
        players.play(40 * round_)
    for turn in set(round_):
        steps = 40 * round_.count(turn)
        own, first = set(players.sampled(turn)), round_.count(turn)
        assert {step for step in SAMPLED if first <= step < steps} <= own
        assert len(own) <= len(SAMPLED) + first + 1


def test_one_after_the_other() -> None:
    """The second begins once the first is done."""
    players = Players()
    with players.watch:
        players.play([0] * 50 + [1] * 50)
    assert set(range(1, FIRST_STEPS)) <= set(players.sampled(1))


class Adversaries(pl.LightningModule):
    """Both step in the same batch, the second every `every` batches."""

    def __init__(self, every: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization, self.every = False, every
        self.critic, self.generator = nn.Linear(4, 1), nn.Linear(4, 4)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.critic, self.generator)]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        first, second = self.optimizers()
        for optimizer, loss in (
            (first, lambda: self.critic(self.generator(batch[0]).detach()) - self.critic(batch[0])),
            (second, lambda: -self.critic(self.generator(batch[0]))),
        ):
            if optimizer is first or index % self.every == self.every - 1:
                optimizer.zero_grad()
                self.manual_backward(loss().mean())
                optimizer.step()


@pytest.mark.parametrize("every", [1, 3])
def test_the_second_in_a_batch_has_signals_too(every: int) -> None:
    memory = Memory()
    data = DataLoader(TensorDataset(torch.randn(120, 4)), batch_size=2)
    quiet_trainer(GradWatch(sinks=[memory]), max_epochs=1).fit(Adversaries(every), data)
    own = [record for record in memory.records if record.optimizer == 1]
    seen = [index for index, record in enumerate(own) if np.isfinite(record.value("signal_rms", "generator"))]
    assert {step for step in SAMPLED if 1 <= step < len(own)} <= set(seen)


def own_steps(optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any] | None = None) -> OptimizerSteps:
    steps = OptimizerSteps(Ignores().step, Ignores().step)
    for optimizer in optimizers:
        steps.enlist(optimizer)
    if state is not None:
        steps.load_state_dict(json.loads(json.dumps(state)))
    return steps


class Ignores:
    def step(self, watched: WatchedOptimizer) -> None:
        pass


@given(turns=st.lists(st.integers(0, 2), max_size=30), stop=st.integers(0, 30))
def test_a_resumed_run_goes_on_with_the_same_turns(turns: list[int], stop: int) -> None:
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))]) for _ in range(3)]
    whole = own_steps(optimizers)
    for turn in turns[:stop]:
        whole.begin(optimizers[turn])
    resumed = own_steps(optimizers, whole.state_dict())
    for turn in turns[stop:]:
        assert resumed.next_index == whole.next_index
        (ours, index), (theirs, expected) = resumed.begin(optimizers[turn]), whole.begin(optimizers[turn])
        assert (ours.number, index) == (theirs.number, expected)
    assert resumed.next_index == whole.next_index


class Wrapper:
    """Steps an optimizer, and is none: it calls no hook of a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inside = optimizer
        self.param_groups, self.state = [*optimizer.param_groups], optimizer.state

    def zero_grad(self) -> None:
        self.inside.zero_grad()

    def step(self) -> None:
        self.inside.step()


@pytest.mark.parametrize("turns", [[0], [0, 1]], ids=str)
def test_one_that_calls_no_hooks_is_sampled_as_any_other(turns: list[int]) -> None:
    """All but its second step: by then it is not known that it calls none."""
    players = Players()
    players.optimizers = [Wrapper(optimizer) for optimizer in players.optimizers]  # type: ignore[misc]
    with players.watch:
        players.play(300 * turns)
    own = [record for record in players.memory.records if record.optimizer == 0]
    sampled = [index for index, record in enumerate(own) if "signal_norm" in record.fresh]
    assert {*sampled} >= SAMPLED - {1}
    assert 1 not in sampled


def test_lbfgs_that_is_made_when_the_hooks_are_off() -> None:
    """Nothing says then when it leaves its step: each gradient counts, as for one that was known before."""
    steps = own_steps(())
    steps.unhook()
    optimizer = torch.optim.LBFGS([torch.zeros(2, requires_grad=True)])
    begun = [steps.begin(optimizer) for _ in range(3)]
    assert [index for _, index in filter(None, begun)] == [0, 1, 2]
