"""Healthy trainings whose numbers are odd: scaled losses, sign updates, heavy tails, shifts, second order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, healthy
from benchmarks.zoo.learner import Learner, accuracy, adam, misfit, mistakes, regress, sgd
from benchmarks.zoo.material import Pair, draw, flat_digits, wave, waves
from benchmarks.zoo.parts import he, mlp, reads_digits, start


def scaled(factor: float) -> Callable[[nn.Module, Pair], tuple[Tensor, Tensor | None]]:
    """Cross entropy times `factor`."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        return factor * F.cross_entropy(logits, batch[1]), accuracy(logits, batch[1])

    return objective


@healthy(quick=True)
def loss_of_a_billionth() -> Fit:
    """The loss times 1e-9 under Adam with an epsilon to match: Adam does not care."""
    return reads_digits(mlp(3), adam(2e-3, eps=1e-20), objective=scaled(1e-9))


@healthy()
def loss_of_a_millionth() -> Fit:
    """The loss times 1e-6 under plain SGD at a rate of 1e5."""
    return reads_digits(start(mlp(3), he), sgd(1e5), objective=scaled(1e-6))


@healthy(quick=True)
def loss_of_ten_thousand() -> Fit:
    """The loss times 1e4 under Adam."""
    return reads_digits(mlp(3), adam(2e-3), objective=scaled(1e4))


@healthy()
def loss_summed_under_adam() -> Fit:
    """The loss summed over a batch of 128: gradients are 128 times the usual, and Adam does not care."""
    return reads_digits(mlp(3), adam(2e-3), objective=scaled(128.0), size=128)


class SignDescent(torch.optim.Optimizer):
    """The sign of an average of gradients times the rate, as in Lion (Chen et al. 2023)."""

    def __init__(self, parameters: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["beta"])
                    p.add_(average.sign(), alpha=-group["lr"])
        return loss


@healthy()
def sign_descent() -> Fit:
    """Every weight moves by the same at every step, whatever the gradient."""
    return reads_digits(mlp(3), lambda m: SignDescent(m.parameters(), lr=5e-4))


@healthy()
def edge_of_stability() -> Fit:
    """Full-batch descent at a rate whose stability limit the curvature reaches (Cohen et al. 2021)."""
    learn, held = flat_digits()
    net = mlp(2, 32, act=nn.Tanh)
    whole = (learn[0][:500], learn[1][:500])
    return Fit(Learner(net, optimizers=sgd(1.0)), [whole] * 300, mistakes(net, held))


@healthy()
def heavy_tails() -> Fit:
    """Targets with Cauchy noise under a Huber loss: now and then one is a thousand times off."""
    batches = [(x, y + 0.1 * torch.distributions.Cauchy(0.0, 1.0).sample(y.shape)) for x, y in waves(200, 64)]

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        return F.huber_loss(net(batch[0]), batch[1]), None

    points = torch.randn(512, 16)
    net = start(mlp(3, inputs=16, outputs=1), he)
    return Fit(Learner(net, objective, adam(3e-3)), batches, misfit(net, (points, wave(points))))


@healthy()
def squared_error_of_heavy_tails() -> Fit:
    """Log-normal factors on squared errors: the gradient's norm varies tenfold from batch to batch."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        weights = torch.exp(1.5 * torch.randn(len(batch[0]), 1))
        return (weights * (net(batch[0]) - batch[1]).square()).mean(), None

    points = torch.randn(512, 16)
    net = start(mlp(3, inputs=16, outputs=1), he)
    return Fit(Learner(net, objective, adam(3e-3)), waves(200, 64), misfit(net, (points, wave(points))))


@healthy()
def data_shifts_midway() -> Fit:
    """At step 100 the digits are inverted (ink is 0, paper 1): the loss jumps, and the model learns them anew."""
    learn, held = flat_digits()
    batches = draw(learn, 100, 32) + draw((1 - learn[0], learn[1]), 150, 32)
    net = start(mlp(3), he)
    return Fit(Learner(net, optimizers=adam(2e-3)), batches, mistakes(net, (1 - held[0], held[1])))


@healthy()
def new_classes_midway() -> Fit:
    """Five classes for 100 steps, then all ten."""
    learn, held = flat_digits()
    few = learn[1] < 5
    batches = draw((learn[0][few], learn[1][few]), 100, 32) + draw(learn, 150, 32)
    net = mlp(3)
    return Fit(Learner(net, optimizers=adam(2e-3)), batches, mistakes(net, held))


@healthy()
def hinge_loss_converges() -> Fit:
    """A multi-class hinge loss: where the margin holds the gradient is exactly zero, at the end for whole batches."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        return F.multi_margin_loss(logits, batch[1], margin=0.5), accuracy(logits, batch[1])

    return reads_digits(mlp(2, 128), adam(3e-3), objective=objective, steps=300)


class Sines(nn.Module):
    """sin(30 x)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)


@healthy()
def sinusoidal_network() -> Fit:
    """A SIREN draws a digit from coordinates (Sitzmann et al. 2020): activations of period 0.2."""
    net = mlp(3, 64, act=Sines, inputs=2, outputs=1)
    for number, layer in enumerate((net.fc1, net.fc2, net.fc3, net.head)):
        bound = 1 / 2 if number == 0 else (6 / 64) ** 0.5 / 30
        nn.init.uniform_(layer.weight, -bound, bound)
    axis = torch.linspace(-1, 1, 8)
    places = torch.cartesian_prod(axis, axis)
    ink = flat_digits()[0][0][0][:, None]
    return Fit(Learner(net, regress, adam(3e-4)), [(places, ink)] * 200, misfit(net, (places, ink)))


@healthy()
def physics_informed() -> Fit:
    """U'' = -u with u(0) = 0, u'(0) = 1: the loss holds second derivatives by the inputs."""
    net = mlp(2, 32, act=nn.Tanh, inputs=1, outputs=1)

    def objective(net: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        x = batch.clone().requires_grad_()
        u = net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        zero = torch.zeros(1, 1, requires_grad=True)
        origin = net(zero)
        (slope,) = torch.autograd.grad(origin.sum(), zero, create_graph=True)
        return (ddu + u).square().mean() + origin.square().sum() + (slope - 1).square().sum(), None

    grid = torch.linspace(0, 3, 64)[:, None]
    batches = list(3 * torch.rand(400, 64, 1))
    return Fit(Learner(net, objective, adam(5e-3)), batches, misfit(net, (grid, torch.sin(grid))))


@healthy()
def held_at_zero() -> Fit:
    """The same with the values at 0 given: one of the two calls of the net gets zeros alone, without a gradient."""
    net = mlp(2, 32, act=nn.Tanh, inputs=1, outputs=1)
    origin = torch.zeros(16, 1)

    def objective(net: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        x = batch.clone().requires_grad_()
        u = net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (du - torch.cos(x)).square().mean() + net(origin).square().mean(), None

    grid = torch.linspace(0, 3, 64)[:, None]
    batches = list(3 * torch.rand(400, 64, 1))
    return Fit(Learner(net, objective, adam(5e-3)), batches, misfit(net, (grid, torch.sin(grid))))


@healthy()
def second_order_steps() -> Fit:
    """LBFGS with a line search: twenty closures a step, and no two steps alike."""
    points = torch.randn(512, 16)
    net = mlp(2, 32, act=nn.Tanh, inputs=16, outputs=1)
    whole = (points, wave(points))

    def optimizers(module: nn.Module) -> Any:
        return torch.optim.LBFGS(module.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")

    return Fit(Learner(net, regress, optimizers), [whole] * 60, misfit(net, whole))


@healthy()
def decayed_properly() -> Fit:
    """AdamW with a weight decay of 0.1, and an L1 penalty that sends many weights to zero."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        penalty = torch.stack([p.abs().sum() for p in net.parameters()]).sum()
        return F.cross_entropy(logits, batch[1]) + 1e-4 * penalty, accuracy(logits, batch[1])

    def optimizers(module: nn.Module) -> Any:
        return torch.optim.AdamW(module.parameters(), 3e-3, weight_decay=0.1)

    return reads_digits(mlp(3), optimizers, objective=objective)


@healthy()
def own_hooks_clip() -> Fit:
    """Each parameter's gradient is clipped by the user's own hook, a documented recipe: small steps, same direction."""
    net = start(mlp(3), he)
    for parameter in net.parameters():
        parameter.register_hook(lambda g: g * (0.5 / (g.norm() + 1e-6)).clamp(max=1.0))
    return reads_digits(net, sgd(0.2))


@healthy()
def inputs_in_thousands_then_normed() -> Fit:
    """Raw inputs up to 16,000 into a batch norm, which takes care of them."""
    learn, held = flat_digits()
    net = nn.Sequential(OrderedDict(norm0=nn.BatchNorm1d(64), **dict(mlp(2).named_children())))
    batches = draw((16000 * learn[0], learn[1]), 150, 32)
    return Fit(Learner(net, optimizers=adam(2e-3)), batches, mistakes(net, (16000 * held[0], held[1])))
