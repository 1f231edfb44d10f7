"""Compiled autograd compiles the hooks of a backward pass: none of ours becomes part of that graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from gradwatch import Scale, Watch, tap
from gradwatch.engine.interventions.runtime import STEPS_TO_ACT
from reference import bits, gradient_norms
from training import train

# torch's own
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:Trying to prepend a node to itself",  # torch 2.6
)

STEPS = 2


class Net(nn.Module):
    """What hooks of every kind look at: tensors that are tapped, views, time steps, probabilities."""

    def __init__(self, *, recurrent: bool, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.in_place = in_place
        self.first = nn.GRU(4, 6) if recurrent else nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = self.first(x)
        states = tap(states if isinstance(states, Tensor) else states[0], "states")
        logits = self.last(states)
        return (logits.mul_(2) if self.in_place else logits * 2).mean(0).softmax(-1)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(watch: Watch | None, model: nn.Module, *, whole_graph: bool, steps: int = STEPS) -> list[dict[str, float]]:
    """The norms of `p.grad` at each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with watch or nullcontext():
        for step in range(steps):
            optimizer.zero_grad()
            inputs = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(inputs), torch.tensor([0, 2]))
            with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=whole_graph)):
                loss.backward()
            norms.append(gradient_norms(model, optimizer))
            if watch is not None:
                watch.step(optimizer, loss=loss.detach())
            optimizer.step()
    return norms


@pytest.mark.parametrize(
    ("signals", "recurrent", "whole_graph"),
    [
        ("safe", False, True),
        pytest.param("safe", False, False, marks=pytest.mark.slow),
        pytest.param("safe", True, True, marks=pytest.mark.slow),
        pytest.param("full", False, True, marks=pytest.mark.slow),
    ],
)
def test_true_and_harmless(signals: str, recurrent: bool, whole_graph: bool) -> None:
    model, alone = (Net(recurrent=recurrent, in_place=signals == "safe") for _ in range(2))
    watch = Watch(model, sinks=(), budget=None, signals=signals)
    norms = trained(watch, model, whole_graph=whole_graph)
    trained(None, alone, whole_graph=whole_graph)
    assert bits(model) == bits(alone)
    assert watch.verdict.notes == ()
    assert not watch.alerts
    for step, truth in enumerate(norms):
        for name, norm in truth.items():
            site = None if name == "total" else name
            assert watch.history.series("grad_norm", site)[step] == pytest.approx(norm, rel=1e-5), (step, name)
    assert "signal_norm" not in watch.history.statistics()


INTERVENTIONS = Scale(0.5, at="hook"), Scale(0.5, on="signal")


@pytest.mark.slow
def test_interventions_that_hooks_do_not_reach_say_so() -> None:
    model = Net(recurrent=False, in_place=True)
    watch = Watch(model, sinks=(), signals="off", interventions=INTERVENTIONS)
    trained(watch, model, whole_graph=True, steps=STEPS_TO_ACT + 1)
    for note, intervention in zip(watch.verdict.notes, INTERVENTIONS, strict=True):
        assert note.startswith(f"{intervention} did not act in the first {STEPS_TO_ACT} steps: no gradient of the loss")


@pytest.mark.parametrize("reached", [True, False])
def test_those_that_they_reach_do_not(reached: bool) -> None:
    """Without compiled autograd; a layer that is frozen is not reached."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    model[0].requires_grad_(reached)
    chosen = [Scale(0.5, layers="0", at="hook"), Scale(0.5, layers="0", on="signal")]
    watch = Watch(model, sinks=(), signals="off", interventions=chosen)
    train(
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda step: model(torch.ones(2, 4)).square().mean(),
        watch,
        steps=STEPS_TO_ACT + 1,
    )
    assert len(watch.verdict.notes) == 2 * (not reached)
