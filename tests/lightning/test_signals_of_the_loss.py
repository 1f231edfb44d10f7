"""What is measured inside a backward pass is of the loss, also where a training step computes other gradients first."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from gradwatch import GradWatch
from models import module_of
from tapped_models import Tapping
from training import fit, numbers

BATCHES, ACCUMULATED = 6, 2


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradients_of(model: Tapping, x: Tensor) -> dict[tuple[str, str], Tensor]:
    """Statistic and site -> the gradient of which it is the norm, in float64."""
    double = copy.deepcopy(model).double()
    first = double.first(x.double())
    hidden = torch.tanh(first)
    outputs = double.last(hidden)
    tensors = {("signal_norm", "net.first"): first, ("signal_norm", "net.last"): outputs}
    tensors |= {("arrived_norm", f"net.{name}"): parameter for name, parameter in double.named_parameters()}
    tensors["grad_norm", "hidden"] = hidden
    gradients = torch.autograd.grad(outputs.square().mean() / ACCUMULATED, [*tensors.values()])
    return dict(zip(tensors, gradients, strict=True))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("signals", ["safe", "full"])
def test_adversarial_training(signals: str) -> None:
    """Inputs are moved along the sign of their gradient (Goodfellow et al. 2015, equation 1), by more where the weights
    have a larger one.
    """
    truths: list[dict[tuple[str, str], Tensor]] = []

    def adversarial_loss(model: Tapping, batch: Tensor, index: int) -> Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(index), requires_grad=True)
        slope, *others = torch.autograd.grad(-3 * loss_of(model, x), [x, *model.parameters()])
        moved = (x - 0.1 * sum(other.norm() for other in others) * slope.sign()).detach()
        truths.append(gradients_of(model, moved))
        return loss_of(model, moved)

    watch = GradWatch(sinks=(), budget=None, signals=signals)
    module = module_of(Tapping(), adversarial_loss, lr=0.1)
    fit(module, watch, data=numbers(BATCHES), max_epochs=1, accumulate_grad_batches=ACCUMULATED)
    for step in range(BATCHES // ACCUMULATED):
        parts = truths[ACCUMULATED * step : ACCUMULATED * (step + 1)]
        for statistic, site in parts[0]:
            truth = math.sqrt(sum(part[statistic, site].square().sum().item() for part in parts))
            measured = watch.history.series(statistic, site)[step]
            assert measured == pytest.approx(truth, rel=1e-5), (step, statistic, site)
    for layer in ("first", "last"):  # the gradient of a bias, computed a second time
        assert watch.history.series("gradient_cosine", f"net.{layer}.bias").min() == pytest.approx(1.0, rel=1e-5)
        assert abs(watch.history.series("gradient_dex", f"net.{layer}.bias")).max() < 1e-5
    assert not watch.alerts


class Silent(Precision):
    """Does not announce the loss, as a plugin of the user's own may."""

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return tensor


@pytest.mark.usefixtures("quiet")
def test_where_the_loss_is_not_announced() -> None:
    """All passes count, from the second step on."""
    watch = GradWatch(sinks=(), budget=None)
    module = module_of(Tapping(), lambda model, batch, index: loss_of(model, torch.ones(4, 6)), lr=0.1)
    fit(module, watch, data=numbers(4), max_epochs=1, plugins=[Silent()])
    for statistic, site in (("signal_norm", "net.first"), ("grad_norm", "hidden"), ("arrived_norm", "net.first.bias")):
        assert (watch.history.series(statistic, site) > 0).tolist() == [False, True, True, True], statistic
    assert watch.verdict.notes == ()


@pytest.mark.usefixtures("quiet")
def test_a_batch_without_a_loss() -> None:
    """After it, the loss is announced as before."""

    def penalized(model: Tapping, batch: Tensor, index: int) -> Tensor:
        torch.autograd.grad(9 * loss_of(model, torch.ones(4, 6)), [*model.parameters()])
        return loss_of(model, torch.ones(4, 6)) if index != 1 else None  # type: ignore[return-value]

    watch = GradWatch(sinks=(), budget=None)
    module = module_of(Tapping(), penalized, lr=0.0)
    fit(module, watch, data=numbers(5), max_epochs=1)
    found = watch.history.series("signal_norm", "net.first")
    assert found[3:] == pytest.approx([found[0]] * 2)
