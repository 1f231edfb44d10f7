"""In Fabric, whose modules and optimizers are wrapped, a watch sees what it sees in the same loop without Fabric."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import nn

from gradwatch import Watch
from reference import bits, hooks_on

STEPS = 8


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches() -> Any:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 4, generator=generator) for _ in range(STEPS)]


def plain_loop(model: nn.Module) -> Watch:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with Watch(model, sinks=(), budget=None) as watch:
        for batch in batches():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    return watch


def fabric_loop(model: nn.Module, *, wrapped: bool) -> Watch:
    fabric = Fabric(accelerator="cpu", devices=1)
    setup, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    with Watch(setup if wrapped else model, sinks=(), budget=None) as watch:
        for batch in batches():
            optimizer.zero_grad()
            loss = setup(batch).square().mean()
            fabric.backward(loss)
            watch.step(optimizer, loss=loss)
            optimizer.step()
    assert hooks_on(setup, optimizer.optimizer) == []
    return watch


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_same_numbers_as_without_fabric(wrapped: bool) -> None:
    model = net()
    alone = copy.deepcopy(model)
    ours, theirs = fabric_loop(model, wrapped=wrapped).history, plain_loop(alone).history
    assert bits(model) == bits(alone)
    assert ours.sites("grad_norm") == theirs.sites("grad_norm")
    assert set(theirs.statistics()) == set(ours.statistics())
    for statistic in ("grad_norm", "grad_norm_clipped", "update_ratio", "signal_norm", "output_rms"):
        for site in theirs.sites(statistic):
            np.testing.assert_array_equal(ours.series(statistic, site), theirs.series(statistic, site))
    assert np.isfinite(ours.series("update_ratio")).any()


@pytest.mark.parametrize("given", [False, True])
def test_with_fabrics_scaler_norms_are_without_its_scale(given: bool) -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu", scaler=scaler))
    setup, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    expected = []
    with Watch(model, scaler=fabric.strategy.precision.scaler if given else None, sinks=()) as watch:
        for batch in batches():
            optimizer.zero_grad()
            fabric.backward(setup(batch).square().mean())
            gradients = [parameter.grad.double() / scaler.get_scale() for parameter in model.parameters()]
            expected.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))
            watch.step(optimizer)
            optimizer.step()
    assert watch.history.series("grad_norm").tolist() == pytest.approx(expected, rel=1e-5)
    assert watch.verdict.notes == ()
