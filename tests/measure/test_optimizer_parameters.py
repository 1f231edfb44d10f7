"""What one optimizer holds: how its gradients and weights are reduced again and again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwatch.measure.optimizer_parameters
from gradwatch import Watch
from gradwatch.measure.device_buffer import DeviceBuffer
from gradwatch.measure.optimizer_parameters import CHANGE_CHECKS, OptimizerParameters
from gradwatch.measure.optimizer_steps import WatchedOptimizer
from gradwatch.measure.stale_gradients import StaleGradientCheck


def holding(parameters: list[nn.Parameter]) -> OptimizerParameters:
    watched = WatchedOptimizer(torch.optim.SGD(parameters), 0)
    return OptimizerParameters([parameters], list(range(len(parameters))), parameters, watched, StaleGradientCheck([]))


@pytest.fixture
def held() -> tuple[OptimizerParameters, DeviceBuffer]:
    parameters = [nn.Parameter(torch.randn(8)) for _ in range(3)]
    of_optimizer = holding(parameters)
    return of_optimizer, DeviceBuffer(torch.device("cpu"), 3, ("grad_norm", "weights"))


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("graph", [False, True], ids=["gradients", "gradients in a graph"])
@pytest.mark.parametrize("enabled", [True, False])
def test_no_graph_grows_and_one_plan_is_enough(
    graph: bool, enabled: bool, held: tuple[OptimizerParameters, DeviceBuffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights need a gradient, and so do gradients that are to be differentiated."""
    of_optimizer, buffer = held
    sum([parameter.pow(3).sum() for parameter in of_optimizer.parameters]).backward(create_graph=graph)
    plans: list[object] = []
    made = gradwatch.measure.optimizer_parameters.Plan

    class Counted(made):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object, **kwargs: object) -> None:
            plans.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(gradwatch.measure.optimizer_parameters, "Plan", Counted)
    for row, tensors in (("grad_norm", of_optimizer.gradients()), ("weights", of_optimizer.weights())):
        with torch.set_grad_enabled(enabled):
            for _ in range(3):
                index = of_optimizer.reduce(buffer, row, tensors)
            assert torch.is_grad_enabled() is enabled
        reported = buffer[row]
        assert not reported.requires_grad
        for parameter, tensor in zip(index, tensors, strict=True):
            assert tensor is not None
            assert float(reported[int(parameter)]) == pytest.approx(float(tensor.detach().norm()), rel=1e-6)
    assert len(plans) == 2
    for parameter in of_optimizer.parameters:
        parameter.grad = None  # a graph that hangs on the gradients keeps itself


def test_a_plan_that_no_longer_fits_leaves_the_grad_mode_alone(held: tuple[OptimizerParameters, DeviceBuffer]) -> None:
    of_optimizer, buffer = held
    of_optimizer.reduce(buffer, "grad_norm", [torch.ones(8)] * 3)
    index = of_optimizer.reduce(buffer, "grad_norm", [torch.ones(2, 2), torch.ones(9), torch.ones(8)])
    assert torch.is_grad_enabled()
    assert [float(buffer["grad_norm"][place]) for place in index] == pytest.approx([2.0, 3.0, 8**0.5])


@pytest.mark.parametrize("size", [8, 2**17], ids=["stacked", "one by one"])
def test_weights_that_are_zero_and_stay_so(size: int) -> None:
    """As biases are while a rate warms up from 0: their norm is taken again, of tensors that need a gradient."""
    parameters = [nn.Parameter(torch.zeros(size)) for _ in range(9)]
    of_optimizer = holding(parameters)
    buffer = DeviceBuffer(torch.device("cpu"), 9, ("weights",))
    for _ in range(3):
        of_optimizer.reduce(buffer, "weights", of_optimizer.weights())
        assert not buffer["weights"][:9].any()


@pytest.mark.parametrize("size", [8, 2**17], ids=["stacked", "one by one"])
def test_gradients_whose_squares_float32_cannot_hold(size: int) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for _ in range(9)]
    of_optimizer = holding(parameters)
    buffer = DeviceBuffer(torch.device("cpu"), 9, ("grad_norm",))
    for scale in (1.0, 1e-30, 1e25):
        of_optimizer.reduce(buffer, "grad_norm", [torch.full((size,), scale)] * 9)
        assert buffer["grad_norm"][:9].tolist() == pytest.approx([scale * size**0.5] * 9, rel=1e-4, abs=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float8_e5m2], ids=str)
def test_weights_of_types_without_a_norm(dtype: torch.dtype) -> None:
    """As weights in four bits, which are frozen but in the optimizer, and indices that are kept as parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    model[0].packed = nn.Parameter(torch.ones(8).to(dtype), requires_grad=False)
    model.codes = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
    model[1].table = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=[]) as watch:
        for _ in range(10):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    assert watch.verdict.notes == ()
    assert len(watch.history) == 10
    assert watch.verdict.untrained_by_reason == {"frozen (requires_grad is False)": ["codes", "0.packed", "1.table"]}
    weights, updates = (watch.history.series(name, "0.weight") for name in ("weight_norm", "update_ratio"))
    assert (weights > 0).sum() == (updates > 0).sum() > 0


def test_a_change_of_a_part_of_the_gradients_is_seen() -> None:
    """As of one layer of many, whichever it is."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4 * CHANGE_CHECKS)]
    of_optimizer = holding(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    for first in range(0, len(parameters), 4):
        gradients = of_optimizer.read_gradients()
        assert not of_optimizer.take_changed(keep=True)
        torch._foreach_mul_(gradients[first : first + 4], 2)
        assert of_optimizer.take_changed()
