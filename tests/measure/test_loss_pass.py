"""Which backward passes count as the loss's where the loop does not announce it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gradwatch import GradWatch, Watch
from gradwatch.interventions import Scale
from reference import square
from tapped_models import Tapping
from training import fit, numbers

STEPS = 3

Loss = Callable[[nn.Module, Tensor], Tensor]


def inputs(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def truth(net: Tapping, loss_of: Loss, x: Tensor) -> dict[tuple[str, str], float]:
    """Statistic and site -> the number, from the gradients of the loss alone, in float64."""
    double, kept = copy.deepcopy(net).double(), dict[tuple[str, str], list[Tensor]]()
    for name, layer in (("first", double.first), ("last", double.last)):
        outputs = kept["signal_norm", name] = []
        layer.register_forward_hook(lambda module, given, output, outputs=outputs: outputs.append(output))
    kept |= {("arrived_norm", name): [parameter] for name, parameter in double.named_parameters()}
    loss = loss_of(double, x.double())
    found = {site: torch.autograd.grad(loss, kept[site], retain_graph=True, allow_unused=True) for site in kept}
    return {site: math.sqrt(sum(square(one) for one in parts if one is not None)) for site, parts in found.items()}


def check(watch: GradWatch | Watch, truths: list[dict[tuple[str, str], float]], prefix: str = "") -> None:
    assert len(truths) == STEPS
    for step, numbers_of_step in enumerate(truths):
        for (statistic, site), number in numbers_of_step.items():
            found = watch.history.series(statistic, prefix + site)[step]
            assert found == pytest.approx(number, rel=1e-5), (step, statistic, site)


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    """A critic's loss with the penalty of Gulrajani et al. 2017, equation 3."""
    x = x.clone().requires_grad_()
    slopes = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    return model(2 * x).mean() + 10 * (slopes.norm(dim=1) - 1).square().mean()


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    slopes = torch.autograd.grad(-3 * model(x).square().mean(), x)[0]
    return model((x + 0.1 * slopes.sign()).detach()).square().mean()


@pytest.mark.parametrize("signals", ["safe", "full"])
@pytest.mark.parametrize("loss_of", [penalized, adversarial])
def test_gradients_of_inputs_do_not_count(loss_of: Loss, signals: str) -> None:
    net, truths = Tapping(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Watch(net, sinks=(), budget=None, signals=signals) as watch:
        for step in range(STEPS):
            truths.append(truth(net, loss_of, inputs(step)))
            optimizer.zero_grad()
            loss_of(net, inputs(step)).backward()
            watch.step(optimizer)
            optimizer.step()
    check(watch, truths)


@pytest.mark.usefixtures("quiet")
def test_in_manual_optimization() -> None:
    truths = []

    class ByHand(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.net = False, Tapping()

        def training_step(self, batch: Tensor, index: int) -> None:
            optimizer, x = self.optimizers(), inputs(index)
            truths.append(truth(self.net, penalized, x))
            optimizer.zero_grad()
            self.manual_backward(penalized(self.net, x))
            optimizer.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    watch = GradWatch(sinks=(), budget=None)
    fit(ByHand(), watch, data=numbers(STEPS))
    check(watch, truths, "net.")


def test_an_intervention_leaves_gradients_of_inputs_alone() -> None:
    net, slopes = Tapping(), []

    def slopes_of(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(net(x).sum(), x)[0]

    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with Watch(net, sinks=(), interventions=[Scale(0.5, layers="last", on="signal")]) as watch:
        for _ in range(STEPS):
            optimizer.zero_grad()
            slopes.append(slopes_of(inputs(0)))
            net(inputs(0)).sum().backward()
            watch.step(optimizer)
            optimizer.step()
    assert all(torch.equal(slope, slopes_of(inputs(0))) for slope in slopes)
    assert net.first.weight.grad is not None
    scaled = net.first.weight.grad.clone()
    net.zero_grad()
    net(inputs(0)).sum().backward()
    torch.testing.assert_close(2 * scaled, net.first.weight.grad)


class Classifier(nn.Module):
    """Sequences [N, 6], seen twice -> probabilities [N, 3]."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head, self.softmax = cell(1, 8), nn.Linear(8, 3), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        x, state = x.repeat(1, 2), None
        if isinstance(self.cell, nn.RNN):
            state = self.cell(x.t().unsqueeze(-1))[0][-1]
        else:
            for part in x.unbind(1):
                state = self.cell(part.unsqueeze(-1), state)
        return self.softmax(self.head(state))


@pytest.mark.parametrize("cell", [nn.RNN, nn.RNNCell])
def test_nor_for_what_is_measured_inside_layers(cell: type[nn.Module]) -> None:
    """A gradient through time, and that of probabilities, with a gradient of inputs before the loss and without."""
    found = {}
    for slopes in (False, True):
        model = Classifier(cell)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Watch(model, sinks=(), budget=None) as watch:
            for step in range(STEPS):
                optimizer.zero_grad()
                for size in (0.1, 10.0) if slopes else ():  # whose gradients fade less, or more
                    x = (size * inputs(step)).requires_grad_()
                    torch.autograd.grad(model(x).square().sum(), x)
                nn.functional.cross_entropy(model(inputs(step)), torch.arange(4) % 3).backward()
                watch.step(optimizer)
                optimizer.step()
        statistics = {"time_steps": "cell", "time_growth": "cell", "logit_misfit": "softmax"}
        statistics |= {"time_gain": "cell"} if cell is nn.RNN else {}
        found[slopes] = [watch.history.series(statistic, site) for statistic, site in statistics.items()]
    np.testing.assert_array_equal(found[True], found[False])
    assert np.isfinite(found[True]).all()


# ---- passes that are the loss's, however they run


def whole(net: Tapping, x: Tensor) -> None:
    net(x).square().mean().backward()


def of_the_first_layer_only(net: Tapping, x: Tensor) -> None:
    """The layer that a gradient comes to first is left out."""
    net(x).square().mean().backward(inputs=[*net.first.parameters()])


def returned(net: Tapping, x: Tensor) -> None:
    set_gradients(net.parameters(), torch.autograd.grad(net(x).square().mean(), [*net.parameters()]))


def of_copies(net: Tapping, x: Tensor) -> None:
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in net.named_parameters()}
    loss = functional_call(net, copies, x).square().mean()
    set_gradients(net.parameters(), torch.autograd.grad(loss, [*copies.values()]))


def frozen_and_recomputed(net: Tapping, x: Tensor) -> None:
    """The pass inside the reentrant checkpoint arrives at no parameter."""
    net.last.requires_grad_(False)
    hidden = net.first(x).tanh()
    checkpoint(net.last, hidden, use_reentrant=True).square().mean().backward()


def of_a_frozen_model(net: Tapping, x: Tensor) -> None:
    """As where inputs are optimized."""
    net.requires_grad_(False)
    set_gradients(net.parameters(), [torch.zeros_like(parameter) for parameter in net.parameters()])
    net(x.requires_grad_()).square().mean().backward()


def set_gradients(parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


@pytest.mark.parametrize(
    "backward", [whole, of_the_first_layer_only, returned, of_copies, frozen_and_recomputed, of_a_frozen_model]
)
def test_passes_of_the_loss_count(backward: Callable[[Tapping, Tensor], None]) -> None:
    net = Tapping()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    expected = truth(net, lambda model, x: model(x).square().mean(), inputs(0))
    with Watch(net, sinks=(), budget=None) as watch:
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward(net, inputs(0))
            watch.step(optimizer)
            optimizer.step()
    for layer in ("first", "last"):
        measured = watch.history.series("signal_norm", layer)
        assert measured == pytest.approx([expected["signal_norm", layer]] * STEPS, rel=1e-5), layer
