"""Trainings that do not blow up and do not learn: a part of the model that no one trains, a loss that says nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, unhealthy
from benchmarks.zoo.healthy_games import Adversaries, off_the_ring, ring
from benchmarks.zoo.healthy_starts import pretrained
from benchmarks.zoo.learner import Learner, adam, misfit, mistakes, sgd
from benchmarks.zoo.material import CLASSES, PIXELS, Pair, draw, flat_digits, wave, waves
from benchmarks.zoo.parts import cnn, layers, mlp, normal, reads_digits, start


class Listed(nn.Module):
    """Hidden layers in `hidden`, a container of any kind."""

    def __init__(self, hidden: Any, width: int) -> None:
        super().__init__()
        self.hidden, self.head = hidden, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden.values() if isinstance(self.hidden, dict | nn.ModuleDict) else self.hidden:
            x = torch.tanh(layer(x))
        return self.head(x)


@unhealthy("frozen", *(f"net.hidden[{n}]" for n in range(3)))
def layers_in_a_list(fixed: bool) -> Fit:
    """Layers in a Python list: parameters() does not list them, and the optimizer never gets them."""
    hidden = [nn.Linear(PIXELS if n == 0 else 12, 12) for n in range(3)]
    return reads_digits(Listed(nn.ModuleList(hidden) if fixed else hidden, 12), adam(3e-3))


@unhealthy("frozen", "net.hidden['first']", "net.hidden['second']")
def branches_in_a_dict(fixed: bool) -> Fit:
    """The same in a dict."""
    hidden = {"first": nn.Linear(PIXELS, 10), "second": nn.Linear(10, 10)}
    return reads_digits(Listed(nn.ModuleDict(hidden) if fixed else hidden, 10), sgd(0.3))


@unhealthy("frozen", "net.head")
def new_head_left_frozen(fixed: bool) -> Fit:
    """Adapters train, and the new head was not listed among what trains besides: its random weights stay."""
    net = pretrained(mlp(2, 48), known=7)
    net.head.reset_parameters()
    for layer in (net.fc1, net.fc2):
        layer.weight.requires_grad_(False)
    net.head.requires_grad_(fixed)
    return reads_digits(net, lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=3e-3))


@unhealthy("bad_head", "net.head")
def targets_without_a_column(fixed: bool) -> Fit:
    """Outputs [N, 1] against targets [N]: each is compared with all, and what is learnt is the targets' mean."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        return (net(batch[0]) - (batch[1] if fixed else batch[1].squeeze(1))).square().mean(), None

    held, net = torch.randn(512, 16), mlp(2, 64, inputs=16, outputs=1)
    return Fit(Learner(net, objective, adam(3e-3)), waves(200, 32), misfit(net, (held, wave(held))))


@unhealthy("bad_head", "net.head")
def values_squeezed(fixed: bool) -> Fit:
    """A critic's values are squeezed to [N] and the returns are a column [N, 1], under a Huber loss."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out = net(batch[0])
        return F.smooth_l1_loss(out if fixed else out.squeeze(), batch[1]), None

    held, net = torch.randn(512, 16), mlp(2, 64, act=nn.Tanh, inputs=16, outputs=1)
    return Fit(Learner(net, objective, adam(3e-3)), waves(200, 48), misfit(net, (held, wave(held))))


@unhealthy("vanishing", *layers(1, 3))
def three_sigmoids(fixed: bool) -> Fit:
    """Three sigmoid layers under SGD: the first gets a three-hundredth of the signal, and the loss does not move."""
    return reads_digits(mlp(3, 32, act=nn.ReLU if fixed else nn.Sigmoid), sgd(0.1), steps=300)


@unhealthy("vanishing", *layers(1, 3))
def start_of_a_ten_thousandth(fixed: bool) -> Fit:
    """Weights from a normal of 1e-4: nothing comes through four layers, forward or backward."""
    net = mlp(3, 32)
    return reads_digits(net if fixed else start(net, normal(1e-4)), sgd(0.1), steps=300)


class Starved(Adversaries):
    """The generator minimises log(1 - D), which is flat where the discriminator is sure."""

    def __init__(self, *, fixed: bool, rate: float = 2e-3) -> None:
        super().__init__(penalty=False)
        self.fixed, self.rate = fixed, rate
        if not fixed and rate == 2e-3:
            nn.init.constant_(self.generator.head.bias, 6.0)

    def configure_optimizers(self) -> Any:
        rates = (self.rate, 2e-3)
        nets = (self.generator, self.critic)
        return [torch.optim.Adam(n.parameters(), lr=r, betas=(0.5, 0.9)) for n, r in zip(nets, rates, strict=True)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.fixed or self.rate != 2e-3:
            return super().training_step(batch, batch_idx)
        one, two = self.optimizers()
        for _ in range(4):
            loss = self._critic_loss(batch, self.generator(torch.randn(len(batch), 4)).detach())
            two.zero_grad()
            self.manual_backward(loss)
            two.step()
        own = -F.softplus(self.critic(self.generator(torch.randn(len(batch), 4)))).mean()
        one.zero_grad()
        self.manual_backward(own)
        one.step()
        return {"loss": own.detach()}


def _starved(module: Starved) -> Fit:
    return Fit(module, [ring(64) for _ in range(300)], off_the_ring(lambda n: module.generator(torch.randn(n, 4))))


@unhealthy("vanishing", "generator")
def generator_gets_nothing(fixed: bool) -> Fit:
    """A saturating loss behind a discriminator that steps four times as often: the generator's gradient dies."""
    return _starved(Starved(fixed=fixed))


@unhealthy("stalled", "generator")
def generator_at_a_thousandth(fixed: bool) -> Fit:
    """The generator's rate is 2e-6, the critic's 2e-3: an exponent was mistaken."""
    return _starved(Starved(fixed=fixed, rate=2e-3 if fixed else 2e-6))


class NeverCleared(torch.optim.Adam):
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Cleared nowhere."""


class CarelessAdversaries(Adversaries):
    """The critic's zero_grad is missing: gradients of all its steps add up, those of the generator's steps too."""

    def configure_optimizers(self) -> Any:
        generator, _ = super().configure_optimizers()
        return [generator, NeverCleared(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.9))]


@unhealthy("stale_grad", "critic")
def critic_never_cleared(fixed: bool) -> Fit:
    """The critic of a GAN follows the sum of all gradients so far, and the generator learns nothing from it."""
    return _starved((Adversaries if fixed else CarelessAdversaries)(penalty=False))


@unhealthy("stalled")
def clipped_to_a_thousandth(fixed: bool) -> Fit:
    """gradient_clip_val=1e-3 under SGD: every step is clipped to a hundredth, and the loss does not move."""
    return reads_digits(mlp(2, 32), sgd(0.1), steps=300, gradient_clip_val=1.0 if fixed else 1e-3)


@unhealthy("input_scale", "net.conv1")
def images_of_nothing(fixed: bool) -> Fit:
    """Pixels are divided by 16 in an array of integers: all are 0."""
    fit = reads_digits(cnn((8, 16)), adam(1e-2), images=True)
    return fit if fixed else replace(fit, batches=[(torch.zeros_like(x), y) for x, y in fit.batches])


@unhealthy("input_scale", "net.fc1")
def bytes_at_the_usual_rate(fixed: bool) -> Fit:
    """Pixels up to 255 at a rate of 0.1: the first steps throw the model off, and its first layer is dead after."""
    (images, labels), (held, answers) = flat_digits()
    factor, net = 1.0 if fixed else 255.0, mlp(2, 32)
    batches = draw((factor * images, labels), 200, 32)
    return Fit(Learner(net, optimizers=sgd(0.1)), batches, mistakes(net, (factor * held, answers)))


class Coder(nn.Module):
    """Digits through a Gaussian code of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(1, outputs=8), mlp(1, inputs=4, outputs=PIXELS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), divergence


def _coded(weight: float, *, rate: float = 3e-3) -> Fit:
    learn, held = flat_digits()
    net = Coder()

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out, divergence = net(batch[0])
        return F.mse_loss(out, batch[0]) + weight * divergence, None

    def measure() -> float:
        with torch.no_grad():
            return float((net(held[0])[0] - held[0]).square().mean() / held[0].var(0).mean())

    return Fit(Learner(net, objective, adam(rate)), draw(learn, 300, 32), measure)


@unhealthy("collapse", "net.encoder.head")
def posterior_collapses(fixed: bool) -> Fit:
    """A divergence summed over the code beside an error averaged over pixels: the code says nothing."""
    return _coded(1e-3 if fixed else 1.0)


@unhealthy("collapse", "net.encoder.head")
def divergence_at_a_tenth(fixed: bool) -> Fit:
    """The divergence weighs a tenth, still a hundred times too much, at a higher rate."""
    return _coded(1e-3 if fixed else 0.1, rate=1e-2)
