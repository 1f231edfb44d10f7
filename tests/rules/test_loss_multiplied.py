"""All rules in real trainings: multiplying the loss by a millionth or a million under Adam changes no alert."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradwatch import Watch
from gradwatch.core.alert import Severity
from models import mlp

Net = Callable[[], nn.Sequential]


def healthy() -> nn.Sequential:
    return mlp(4, inputs=16, depth=4, width=32, seed=None)


def fading() -> nn.Sequential:
    return mlp(4, inputs=16, depth=10, width=32, act=nn.Sigmoid, seed=None)


def softmax_first() -> nn.Sequential:
    return nn.Sequential(*healthy(), nn.Softmax(dim=-1))


def turned() -> nn.Sequential:
    net = healthy()
    for parameter in net[2].parameters():
        parameter.register_hook(torch.neg)
    return net


def dying() -> nn.Sequential:
    net = healthy()
    with torch.no_grad():
        net[4].bias.fill_(-50.0)
    return net


def cut() -> nn.Sequential:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    net = healthy()
    net.insert(4, Cut())
    return net


def alerts(make: Net, factor: float) -> list[tuple[str, int, frozenset[str]]]:
    """Without the layer named first: one whose signal float32 cannot square is measured a sample later."""
    torch.manual_seed(0)
    net, rule = make(), nn.Linear(16, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, eps=1e-30)
    with Watch(net, sinks=(), budget=None) as watch:
        for _ in range(60):
            x = torch.randn(64, 16)
            optimizer.zero_grad()
            loss = factor * nn.functional.cross_entropy(net(x), rule(x).argmax(-1))
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    assert watch.verdict.notes == ()
    return [(a.rule, a.step, frozenset(a.sites)) for a in watch.alerts if a.severity is not Severity.NOTICE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (healthy, []),
        (fading, ["vanishing"]),
        (softmax_first, ["bad_head"]),
        (turned, ["tampered"]),
        (dying, ["dead"]),
        (cut, ["disconnected"]),
    ],
)
def test_the_scale_of_the_loss_changes_no_alert(make: Net, rules: list[str]) -> None:
    plain = alerts(make, 1.0)
    assert [rule for rule, *_ in plain] == rules
    assert alerts(make, 1e-6) == plain
    assert alerts(make, 1e6) == plain
