"""Several optimizers: each has its own first samples, in whatever order they step, also after a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradwatch import Watch
from gradwatch.core.schedule import EARLY_STEPS, FIRST_STEPS
from gradwatch.measure.optimizer_steps import OptimizerSteps
from gradwatch.sinks.memory import Memory

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


def own_steps(optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any] | None = None) -> OptimizerSteps:
    steps = OptimizerSteps(Ignores().step, Ignores().step)
    steps.add(*optimizers)
    if state is not None:
        steps.load_state_dict(json.loads(json.dumps(state)))
    return steps


class Ignores:
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


@given(turns=st.lists(st.integers(0, 2), max_size=30), stop=st.integers(0, 30))
def test_a_resumed_run_goes_on_with_the_same_turns(turns: list[int], stop: int) -> None:
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))]) for _ in range(3)]
    whole = own_steps(optimizers)
    for turn in turns[:stop]:
        whole.begin(optimizers[turn])
    resumed = own_steps(optimizers, whole.state_dict())
    for turn in turns[stop:]:
        assert resumed.next_index() == whole.next_index()
        assert resumed.begin(optimizers[turn]) == whole.begin(optimizers[turn])
    assert resumed.next_index() == whole.next_index()
