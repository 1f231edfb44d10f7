"""Faults made at a random step of a real training: one incident, dated to that step, the same under the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from gradwatch import Watch
from gradwatch.core.alert import Alert, Severity
from training import train

STEPS = random.Random("onsets").sample(range(25, 150), 5)
"""Spikes need twenty steps before them."""


class Net(nn.Module):
    """A regression with two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act, self.body, self.side = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 16)
        self.relu, self.head = nn.ReLU(), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        return self.head(self.relu(self.body(x)) + self.side(x))


@dataclass(frozen=True)
class Fault:
    """What is done before a step, and to its batch."""

    rule: str
    layer: str
    change: Callable[[Net, torch.optim.Optimizer], object] = lambda net, optimizer: None
    batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y)


def kill(net: Net, _: object) -> None:
    net.body.bias.data.sub_(50.0)


def jump(_: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 50.0


def forget(net: Net, optimizer: torch.optim.Optimizer) -> None:
    mine = [net.side.weight, net.side.bias]
    held = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [p for p in held if not any(p is one for one in mine)]


def lost(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.index_fill(0, torch.tensor([3]), float("nan")), y


FAULTS = {
    "units killed": Fault("dead", "body", kill),
    "a rate that jumps": Fault("divergence", "", jump),
    "a layer that leaves the optimizer": Fault("frozen", "side", forget),
    "a NaN in a batch": Fault("nonfinite", "", batch=lost),
    "targets too large": Fault("spike", "", batch=lambda x, y: (x, 300 * y)),
}


def alerts_of(fault: Fault, at: int) -> tuple[Alert, ...]:
    torch.manual_seed(at)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    watch = Watch(net, sinks=())

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, 8)
        y = torch.sin(x.sum(1, keepdim=True))
        x, y = fault.batch(x, y) if step == at else (x, y)
        return nn.functional.mse_loss(net(x), y)

    def before(step: int) -> None:
        if step == at:
            fault.change(net, optimizer)

    train(optimizer, loss_of, watch, steps=at + 80, before=before)
    return watch.alerts


once = cache(alerts_of)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("at", [pytest.param(at, marks=[pytest.mark.slow] * (n > 1)) for n, at in enumerate(STEPS)])
def test_a_fault_is_one_incident_dated_to_its_step(name: str, at: int) -> None:
    fault = FAULTS[name]
    found = once(fault, at)
    loud = [alert for alert in found if alert.severity is not Severity.NOTICE]
    assert [(alert.rule, alert.step) for alert in loud] == [(fault.rule, at)], [str(alert) for alert in loud]
    assert loud[0].noticed >= at
    assert not fault.layer or loud[0].layer == fault.layer
    assert all(effect.step is None or effect.step >= at for effect in loud[0].effects)


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_seed_has_the_same_alerts(name: str) -> None:
    assert alerts_of(FAULTS[name], STEPS[0]) == once(FAULTS[name], STEPS[0])
