"""How many kernels interventions give an accelerator: counted with fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from fake_devices import ByOperators, Kernels, landing_at_once
from fake_models import deep, gpt
from gradwatch import AdaptiveClip, Clip
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.multiply import multiply_each
from gradwatch.engine.interventions.runtime import InterventionRuntime
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.optimizer_steps import WatchedOptimizer
from gradwatch.measure.step_info import StepInfo


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    landing_at_once(monkeypatch)
    with FakeTensorMode(), ByOperators():
        yield


def kernels_of(intervention: Any, model: nn.Module, *, without: int | None = None) -> list[str]:
    """Those of the second step. `without`: a parameter that has no gradient."""
    for place, parameter in enumerate(model.parameters()):
        parameter.grad = None if place == without else torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=False)
    reader = GradientReader(model, ("*",), LossPass(nn.Module()), [])
    watched = WatchedOptimizer(optimizer, 0)
    reader.register((watched,))
    held = reader.held_by(watched)
    diagnosis = Diagnosis((), (), on_alert=lambda alert: None)
    layers = [layer.name for layer in reader.layers]
    runtime = InterventionRuntime(
        [intervention],
        layers,
        diagnosis,
        TrainingMode(),
        end=lambda why: None,
        acts=lambda: True,
        reports_batches=False,
    )
    runtime.open(reader)
    for step in range(2):
        info = StepInfo(step, step, {})
        reading = reader.measure(held, info)
        with Kernels() as kernels:
            runtime.act(held, step, info, 0, reading, reader=reader)
        assert runtime.active, "none has failed"
    return kernels.names


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [gpt, deep])
def test_clip_by_layer(build: Any, dtype: torch.dtype) -> None:
    """bfloat16 is multiplied in float32, 48 MiB of it at once: three calls each."""
    model = build(dtype)
    kernels = kernels_of(Clip(1.0), model)
    multiplied = kernels.count("_foreach_mul_")
    if dtype is torch.float32:
        assert multiplied == 1
        assert len(kernels) <= 30
    else:
        pieces = -(-sum(parameter.numel() for parameter in model.parameters()) * 4 // (48 * 2**20))
        assert multiplied <= pieces * 2
        assert len(kernels) - 3 * multiplied <= 30


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [gpt, deep])
def test_adaptive_clip(build: Any, dtype: torch.dtype) -> None:
    """Besides the norms of the rows of each large matrix and of its gradient, and what Clip takes in bfloat16."""
    model = build(dtype)
    kernels = kernels_of(AdaptiveClip(), model)
    large = [parameter.numel() for parameter in model.parameters() if parameter.numel() > 2**16]
    norms = 2 * sum(-(-numel // 2**22) + 1 for numel in large)
    copies = 3 * kernels.count("_foreach_mul_") if dtype is torch.bfloat16 else 1
    assert len(kernels) - copies <= 40 + norms, sorted(kernels)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("intervention", [Clip(1.0), Clip(1.0, per="group"), AdaptiveClip()])
def test_a_parameter_without_a_gradient_needs_no_copy_to_the_device(intervention: Any) -> None:
    """Once where it is, nothing is sent there again: each copy takes the time of ten kernels."""
    model = deep(torch.float32)[:20]
    with_all, without = (kernels_of(intervention, model, without=place) for place in (None, 3))
    assert not [name for name in (*with_all, *without) if name == "_to_copy:host"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_by_its_own_factor(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in float32, however many are had in it at once; a factor of 1 changes no bit."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in [(3, 4), (5,), (), (2, 3, 4, 5), (7, 1)]]
    factors = [torch.rand(()) for _ in tensors[:-1]] + [torch.rand(7, 1)]
    factors[1] = torch.ones(())
    expected = [(tensor.float() * factor).to(dtype) for tensor, factor in zip(tensors, factors, strict=True)]
    for widened in (1, 100, 2**30):
        monkeypatch.setattr("gradwatch.engine.interventions.multiply.WIDENED", widened)
        found = [tensor.clone() for tensor in tensors]
        multiply_each(found, factors)
        assert all(map(torch.equal, found, expected))
    assert np.array_equal(found[1].float().numpy(), tensors[1].float().numpy())
