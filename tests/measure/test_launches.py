"""How many kernels an accelerator is given: counted with fake tensors, which have a device and no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fake_devices import ByOperators, Kernels, landing_at_once
from fake_models import deep, gpt
from gradwatch.measure import reductions
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.optimizer_steps import WatchedOptimizer
from gradwatch.measure.reductions import zeros_by_signs
from gradwatch.measure.step_info import StepInfo


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    landing_at_once(monkeypatch)
    with FakeTensorMode(), ByOperators():
        yield


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("build", "most"), [(gpt, 60), (deep, 120)])
def test_a_step(build: Any, most: int, dtype: torch.dtype) -> None:
    """Gradients, zeros, weights, what has arrived, updates: all that a sampled step reads of the parameters."""
    model = build(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reader = GradientReader(model, ("*",), LossPass(model), [])
    watched = WatchedOptimizer(optimizer, 0)
    reader.register((watched,))
    held, arrivals = reader.held_by(watched), reader.parameter_hooks._arrivals
    for _ in range(2):
        for sampled in (False, True):
            with Kernels() as kernels:
                reader.parameter_hooks.disarm()
                if sampled:
                    reader.parameter_hooks.arm()
                    arrivals.pending += range(len(reader.parameters))
                    arrivals.finish_pass()
                reading = reader.measure(held, StepInfo(0, 0, {}), sampled=sampled)
                if held.take_changed() or sampled:
                    reader.remeasure(held)
                reader.measure_after(held, sampled=sampled)
            assert not reader.errors
            assert ("arrived" in reading.index) is sampled
            assert len(kernels.names) <= (most if sampled else 5), sorted(kernels.names)


@pytest.mark.parametrize("together", [1, 100, 10_000, 2**30])
def test_zeros_are_counted_by_signs(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's way, run on the CPU: whatever is cut where, and in any order of memory."""
    sign, made = torch._foreach_sign, list[int]()
    monkeypatch.setattr(reductions, "COUNTED_TOGETHER", max(4, together))
    monkeypatch.setattr(torch, "_foreach_sign", lambda parts: made.append(sum(p.nbytes for p in parts)) or sign(parts))
    torch.manual_seed(0)
    tensors: list[Tensor] = [
        torch.randn(5, 7),
        torch.zeros(3, 4),
        torch.full((9,), torch.inf),
        torch.full((2,), -0.0),
        torch.full((3,), 1e-42),
        torch.randn(30, 7).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(0.0),
        torch.randn(64)[::2],
    ]
    for tensor in tensors[:2] + tensors[5:7]:
        tensor[tensor.abs() < 0.3] = 0
    out = torch.full((len(tensors),), -1.0, dtype=torch.float64)
    zeros_by_signs(tensors, out)
    assert out.tolist() == [float((tensor == 0).sum()) for tensor in tensors]
    zeros_by_signs([tensor.bfloat16() for tensor in tensors[:2]], out[:2])
    assert out[:2].tolist() == [float((tensor == 0).sum()) for tensor in tensors[:2]]
    assert max(made) <= max(4, together)
