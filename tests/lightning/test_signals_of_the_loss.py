"""Signals and tapped gradients are those of the loss, also where a training step computes other gradients first."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from gradwatch import GradWatch, tap
from models import module_of
from training import fit, numbers

BATCHES, ACCUMULATED = 6, 2


class Tapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.second(tap(torch.tanh(self.first(x)), "hidden"))
        return outputs


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def signals_of(model: Tapped, x: Tensor) -> dict[str, Tensor]:
    """dL/d(output) of both layers and of what is tapped, in float64."""
    double = copy.deepcopy(model).double()
    first = double.first(x.double())
    hidden = torch.tanh(first)
    outputs = double.second(hidden)
    signals = torch.autograd.grad(outputs.square().mean() / ACCUMULATED, [first, outputs, hidden])
    return dict(zip(("net.first", "net.second", "hidden"), signals, strict=True))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("signals", ["safe", "full"])
def test_adversarial_training(signals: str) -> None:
    """Inputs are moved along the sign of their gradient (Goodfellow et al. 2015, equation 1)."""
    truths: list[dict[str, Tensor]] = []

    def adversarial_loss(model: Tapped, batch: Tensor, index: int) -> Tensor:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(index), requires_grad=True)
        (slope,) = torch.autograd.grad(loss_of(model, x), x)
        moved = (x + 0.1 * slope.sign()).detach()
        truths.append(signals_of(model, moved))
        return loss_of(model, moved)

    watch = GradWatch(sinks=(), budget=None, signals=signals)
    module = module_of(Tapped(), adversarial_loss, lr=0.1)
    fit(module, watch, data=numbers(BATCHES), max_epochs=1, accumulate_grad_batches=ACCUMULATED)
    for step in range(BATCHES // ACCUMULATED):
        parts = truths[ACCUMULATED * step : ACCUMULATED * (step + 1)]
        for site in parts[0]:
            truth = math.sqrt(sum(part[site].square().sum().item() for part in parts))
            statistic = "grad_norm" if site == "hidden" else "signal_norm"
            assert watch.history.series(statistic, site)[step] == pytest.approx(truth, rel=1e-5), (step, site)
