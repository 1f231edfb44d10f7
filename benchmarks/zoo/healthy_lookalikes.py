"""Healthy trainings that look like those that do not learn: parameters outside, pairs, critics ahead, frozen heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, healthy
from benchmarks.zoo.healthy_starts import pretrained
from benchmarks.zoo.learner import Learner, adam, mistakes, sgd
from benchmarks.zoo.material import CLASSES, PIXELS, Pair, draw, flat_digits, wave, waves
from benchmarks.zoo.parts import mlp, reads_digits
from benchmarks.zoo.unhealthy_unlearnt import Coder, Starved, _coded, _starved


class Perceived(nn.Module):
    """An autoencoder whose error is that of features, of a net that is kept in a list to stay out of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2, 32, outputs=PIXELS)
        self.features = [pretrained(mlp(2, 32)).eval()]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@healthy()
def perceptual_network_in_a_list() -> Fit:
    """The network of a perceptual loss, in evaluation mode and in no optimizer, needs gradients by oversight."""
    learn, held = flat_digits()
    net = Perceived()

    def objective(net: Any, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out, features = net(batch[0]), net.features[0]
        return F.mse_loss(features(out), features(batch[0])) + F.mse_loss(out, batch[0]), None

    def measure() -> float:
        with torch.no_grad():
            return float((net(held[0]) - held[0]).square().mean() / held[0].var())

    return Fit(Learner(net, objective, adam(3e-3)), draw(learn, 200, 32), measure)


@healthy()
def distances_of_all_pairs() -> Fit:
    """Maximum mean discrepancy: x[:, None] - y, where y needs no gradient and both have as many rows."""
    net, target = mlp(2, 32, inputs=4, outputs=2), torch.randn(512, 2) * 0.3 + torch.tensor([2.0, -1.0])

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (-(x[:, None] - y).square().sum(-1)).exp().mean() + (
            -(x[:, None] - y).square().sum(-1) / 16
        ).exp().mean()

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out = net(batch[0])
        return kernel(out, out) - 2 * kernel(out, batch[1]) + kernel(batch[1], batch[1]), None

    def measure() -> float:
        with torch.no_grad():
            return float((net(torch.randn(512, 4)).mean(0) - target.mean(0)).norm())

    batches = [(torch.randn(64, 4), target[torch.randint(512, (64,))]) for _ in range(200)]
    return Fit(Learner(net, objective, adam(5e-3)), batches, measure)


@healthy()
def quantiles_as_many_as_examples() -> Fit:
    """32 quantiles of 32 examples under a pinball loss: [32, 32] against [32, 1], as it should be."""
    net, held = mlp(2, 64, inputs=16, outputs=32), torch.randn(512, 16)
    levels = (torch.arange(32) + 0.5) / 32

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        missing = batch[1] - net(batch[0])
        return torch.maximum(levels * missing, (levels - 1) * missing).mean(), None

    def measure() -> float:
        with torch.no_grad():
            return float((net(held)[:, 15:17].mean(1, keepdim=True) - wave(held)).square().mean() / wave(held).var())

    return Fit(Learner(net, objective, adam(3e-3)), waves(200, 32), measure)


@healthy()
def critic_at_ten_times_the_rate() -> Fit:
    """Two time scales: the critic's rate is ten times the generator's."""
    return _starved(Starved(fixed=True, rate=5e-4))


@healthy()
def adapters_under_a_trained_head() -> Fit:
    """Adapters in a trained model whose head, trained too, stays as it is on purpose."""
    net = pretrained(mlp(3, 48), known=CLASSES, steps=60)
    for layer in (net.fc1, net.fc2, net.head):
        layer.requires_grad_(False)
    return reads_digits(net, lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=3e-3))


@healthy()
def bytes_at_a_small_rate() -> Fit:
    """Pixels up to 255, under Adam at 1e-3: the first loss is four times the usual, and it learns."""
    fit, held = reads_digits(mlp(2, 32), adam(1e-3), steps=200), flat_digits()[1]
    pair = (255 * held[0], held[1])
    return replace(fit, batches=[(255 * x, y) for x, y in fit.batches], yardstick=mistakes(fit.module.net, pair))


@healthy()
def code_that_starts_at_zero() -> Fit:
    """A VAE whose means and variances start at exactly 0 and grow."""
    fit = _coded(1e-3)
    net: Coder = fit.module.net
    nn.init.zeros_(net.encoder.head.weight)
    nn.init.zeros_(net.encoder.head.bias)
    return fit


@healthy()
def loss_in_plateaus() -> Fit:
    """Two tanh layers under a small rate: the loss hardly moves for a hundred steps, and falls then."""
    return reads_digits(mlp(2, 32, act=nn.Tanh), sgd(0.03), steps=600)


@healthy()
def one_image_blanked() -> Fit:
    """Every fourth image is dropped to zero, as a conditioning is for guidance."""
    fit = reads_digits(mlp(2, 64), adam(3e-3))
    for images, _ in fit.batches:
        images[::4] = 0
    return fit
