"""Reports of adversaries: one optimizer of two starves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning as L
from benchmarks.reports.report import report
from benchmarks.zoo.case import Fit
from benchmarks.zoo.healthy_games import off_the_ring, ring
from benchmarks.zoo.parts import mlp


class _GAN(L.LightningModule):
    """A generator of points and a discriminator that steps several times as often."""

    def __init__(self, *, saturating: bool, rates: tuple[float, float], turns: int = 1, apart: float = 0.0) -> None:
        super().__init__()
        self.generator = mlp(2, 32, inputs=4, outputs=2)
        self.discriminator = mlp(2, 32, act=lambda: nn.LeakyReLU(0.2), inputs=2, outputs=1)
        self.saturating, self.rates, self.turns = saturating, rates, turns
        nn.init.constant_(self.generator.head.bias, apart)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        nets = (self.generator, self.discriminator)
        return [
            torch.optim.Adam(net.parameters(), lr=lr, betas=(0.5, 0.9))
            for net, lr in zip(nets, self.rates, strict=True)
        ]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        one, two = self.optimizers()
        for _ in range(self.turns):
            fake = self.generator(torch.randn(len(batch), 4)).detach()
            real_loss = F.binary_cross_entropy(self.discriminator(batch).sigmoid(), torch.ones(len(batch), 1))
            fake_loss = F.binary_cross_entropy(self.discriminator(fake).sigmoid(), torch.zeros(len(batch), 1))
            two.zero_grad()
            self.manual_backward(real_loss + fake_loss)
            two.step()
        judged = self.discriminator(self.generator(torch.randn(len(batch), 4)))
        own = (1 - judged.sigmoid()).log().mean() if self.saturating else F.softplus(-judged).mean()
        if self.saturating:
            own = torch.log1p(-judged.sigmoid() + 1e-7).mean()
        one.zero_grad()
        self.manual_backward(own)
        one.step()
        return {"loss": own.detach()}


def _gan(**how: Any) -> Fit:
    module = _GAN(**how)
    measure = off_the_ring(lambda size: module.generator(torch.randn(size, 4)))
    return Fit(module, [ring(64) for _ in range(400)], measure)


@report(
    "https://github.com/soumith/ganhacks/issues/67",
    "vanishing",
    "saturation",
    fix="logits in place of the sigmoid's output, and a loss that does not saturate",
    layers=("generator",),
)
def generator_behind_a_saturated_sigmoid(fixed: bool) -> Fit:
    """The discriminator ends in a sigmoid and wins: log(1 - D) is flat there, and the generator gets nothing."""
    return _gan(saturating=not fixed, rates=(2e-3, 2e-3), turns=1 if fixed else 5, apart=0.0 if fixed else 8.0)


@report(
    "https://github.com/ptran1203/pytorch-animeGAN/issues/25",
    "stalled",
    fix="rates of the same size",
    layers=("generator",),
)
def generator_at_a_thousandth_of_the_rate(fixed: bool) -> Fit:
    """The discriminator's rate is far above the generator's, which falls behind from the first step on."""
    return _gan(saturating=False, rates=(2e-3 if fixed else 2e-6, 2e-3))
