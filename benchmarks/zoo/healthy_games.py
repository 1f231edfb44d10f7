"""Healthy trainings that are no plain descent: adversaries, samples, targets that stop the gradient, rewards."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning as L
from benchmarks.zoo.case import Fit, healthy
from benchmarks.zoo.learner import Learner, adam
from benchmarks.zoo.material import PIXELS, Pair, draw, flat_digits
from benchmarks.zoo.parts import mlp


def ring(size: int) -> Tensor:
    """Points of eight bumps on a ring, [size, 2]."""
    angle = torch.randint(8, (size,)) * (torch.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], -1) + 0.05 * torch.randn(size, 2)


def off_the_ring(sample: Callable[[int], Tensor]) -> Callable[[], float]:
    """How far 512 samples are from a radius of 1 on average, and their spread from that of a ring."""

    def measure() -> float:
        with torch.no_grad():
            points = sample(512)
        return float((points.norm(dim=-1) - 1).abs().mean() + (points.std(0) - 0.7071).abs().mean())

    return measure


class Adversaries(L.LightningModule):
    """A generator and a critic that take turns; `penalty`: WGAN with gradient penalty (Gulrajani et al. 2017)."""

    def __init__(self, *, penalty: bool) -> None:
        super().__init__()
        self.generator = mlp(2, 32, inputs=4, outputs=2)
        self.critic = mlp(2, 32, act=lambda: nn.LeakyReLU(0.2), inputs=2, outputs=1)
        self.penalty = penalty
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        rate = {"lr": 5e-3 if self.penalty else 2e-3, "betas": (0.5, 0.9)}
        return [torch.optim.Adam(net.parameters(), **rate) for net in (self.generator, self.critic)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        one, two = self.optimizers()
        fake = self.generator(torch.randn(len(batch), 4))
        loss = self._critic_loss(batch, fake.detach())
        two.zero_grad()
        self.manual_backward(loss)
        two.step()
        if batch_idx % 2 == 0:
            judged = self.critic(fake)
            own = -judged.mean() if self.penalty else F.softplus(-judged).mean()
            one.zero_grad()
            self.manual_backward(own)
            one.step()
        return {"loss": loss.detach()}

    def _critic_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        if not self.penalty:
            return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        wasserstein = self.critic(fake).mean() - self.critic(real).mean()
        return wasserstein + 10 * (slope.norm(dim=-1) - 1).square().mean()


def _adversaries(*, penalty: bool) -> Fit:
    module = Adversaries(penalty=penalty)
    measure = off_the_ring(lambda size: module.generator(torch.randn(size, 4)))
    return Fit(module, [ring(64) for _ in range(500 if penalty else 300)], measure)


@healthy()
def adversarial() -> Fit:
    """A GAN: two optimizers, and a loss that says nothing about progress."""
    return _adversaries(penalty=False)


@healthy()
def adversarial_with_gradient_penalty() -> Fit:
    """A WGAN-GP: gradients of gradients, and losses of either sign."""
    return _adversaries(penalty=True)


class Autoencoder(nn.Module):
    """Digits through a Gaussian or a codebook bottleneck of eight numbers."""

    def __init__(self, *, codebook: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(1, outputs=8 if codebook else 16), mlp(1, inputs=8, outputs=PIXELS)
        self.codes = nn.Parameter(0.3 * torch.randn(64, 4)) if codebook else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reconstruction and the loss of the bottleneck."""
        z = self.encoder(x)
        if self.codes is None:
            mean, log_variance = z.chunk(2, -1)
            divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
            return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), divergence
        parts = z.unflatten(-1, (2, 4))
        nearest = self.codes[(parts[..., None, :] - self.codes).square().sum(-1).argmin(-1)]
        loss = (nearest - parts.detach()).square().mean() + 0.25 * (nearest.detach() - parts).square().mean()
        return self.decoder((parts + (nearest - parts).detach()).flatten(-2)), loss


def _autoencoder(*, codebook: bool, weight: float) -> Fit:
    learn, held = flat_digits()
    net = Autoencoder(codebook=codebook)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out, bottleneck = net(batch[0])
        return F.mse_loss(out, batch[0]) + weight * bottleneck, None

    def measure() -> float:
        with torch.no_grad():
            return float((net(held[0])[0] - held[0]).square().mean() / held[0].var())

    return Fit(Learner(net, objective, adam(3e-3)), draw(learn, 250, 32), measure)


@healthy()
def variational_autoencoder() -> Fit:
    """A VAE: the gradient passes through samples."""
    return _autoencoder(codebook=False, weight=1e-3)


@healthy()
def codebook_autoencoder() -> Fit:
    """A VQ-VAE: straight-through past an argmin, stop-gradients, and codes that no batch uses."""
    return _autoencoder(codebook=True, weight=1.0)


@healthy()
def diffusion() -> Fit:
    """A denoiser of points at random noise levels: the loss has a floor of noise."""
    net = mlp(3, 64, act=nn.SiLU, inputs=3, outputs=2)

    def objective(net: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        level, noise = torch.rand(len(batch), 1), torch.randn_like(batch)
        noisy = (1 - level).sqrt() * batch + level.sqrt() * noise
        return F.mse_loss(net(torch.cat([noisy, level], -1)), noise), None

    points, level = ring(2000), torch.full((2000, 1), 0.5)
    noise = torch.randn_like(points)
    seen = torch.cat([0.5**0.5 * (points + noise), level], -1)

    def measure() -> float:
        with torch.no_grad():
            return float(F.mse_loss(net(seen), noise))

    return Fit(Learner(net, objective, adam(3e-3)), [ring(128) for _ in range(250)], measure)


class Coupling(nn.Module):
    """One half of a point scales and shifts the other (Dinh et al. 2017)."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.net, self.flip = mlp(1, 32, inputs=1, outputs=2), flip
        nn.init.zeros_(self.net.head.weight)
        nn.init.zeros_(self.net.head.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.flip(-1).chunk(2, -1) if self.flip else x.chunk(2, -1)
        scale, shift = self.net(a).chunk(2, -1)
        out = torch.cat([a, b * torch.tanh(scale).exp() + shift], -1)
        return (out.flip(-1) if self.flip else out), torch.tanh(scale).squeeze(-1)


@healthy()
def normalising_flow() -> Fit:
    """A RealNVP whose couplings start at zero: the loss is a negative log-density and may fall below 0."""
    net = nn.ModuleList(Coupling(bool(n % 2)) for n in range(6))

    def density(x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for coupling in net:
            x, logs = coupling(x)
            total = total + logs
        return 0.5 * x.square().sum(-1) + 1.8379 - total

    held = ring(1000)

    def measure() -> float:
        with torch.no_grad():
            return float(density(held).mean().exp())

    return Fit(
        Learner(net, lambda _, x: (density(x).mean(), None), adam(5e-3)), [ring(128) for _ in range(200)], measure
    )


class Siamese(nn.Module):
    """SimSiam (Chen and He 2021), or BYOL with a slow copy as the target (Grill et al. 2020)."""

    def __init__(self, *, slow: bool) -> None:
        super().__init__()
        self.encoder, self.predictor = mlp(2, norm=nn.BatchNorm1d, outputs=32), mlp(1, 16, inputs=32, outputs=32)
        self.target = deepcopy(self.encoder).requires_grad_(False) if slow else None

    def loss(self, one: Tensor, two: Tensor) -> Tensor:
        if self.target is not None:
            with torch.no_grad():
                for kept, new in zip(self.target.parameters(), self.encoder.parameters(), strict=True):
                    kept.lerp_(new, 0.05)
        teacher = self.encoder if self.target is None else self.target
        pairs = ((one, two), (two, one))
        similar = [F.cosine_similarity(self.predictor(self.encoder(a)), teacher(b).detach()).mean() for a, b in pairs]
        return -(similar[0] + similar[1]) / 2


def _siamese(*, slow: bool) -> Fit:
    learn, held = flat_digits()
    net = Siamese(slow=slow)

    def blur(x: Tensor) -> Tensor:
        return x + 0.2 * torch.randn_like(x)

    def objective(net: Any, batch: Pair) -> tuple[Tensor, Tensor | None]:
        return net.loss(blur(batch[0]), blur(batch[0])), None

    def measure() -> float:
        with torch.no_grad():
            return float(1.01 + net.loss(blur(held[0]), blur(held[0])))

    return Fit(Learner(net, objective, adam(2e-3)), draw(learn, 150, 64), measure)


@healthy()
def siamese_with_stopped_gradient() -> Fit:
    """SimSiam: half of the forward passes give no gradient, and the loss is negative."""
    return _siamese(slow=False)


@healthy(quick=True)
def siamese_with_target_network() -> Fit:
    """BYOL: a target network that is in no optimizer and follows by averaging."""
    return _siamese(slow=True)
