"""Healthy trainings that begin oddly: from zero, from a trained model, at rate zero; deep ones with the right start."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning as L
from benchmarks.zoo.case import Fit, healthy
from benchmarks.zoo.learner import Optimizers, adam
from benchmarks.zoo.material import CLASSES, PIXELS, draw, flat_digits
from benchmarks.zoo.parts import GPT, Residual, cnn, he, mlp, reads_digits, reads_text, start


def pretrained(net: nn.Module, *, steps: int = 60, known: int = 5) -> nn.Module:
    """`net`, taught the digits under `known` in a plain loop beforehand."""
    inputs, labels = flat_digits()[0]
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for x, y in draw((inputs[labels < known], labels[labels < known]), steps, 32):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return net


def scheduled(optimizer: Callable[[Any], torch.optim.Optimizer], rate: Callable[[int], float]) -> Optimizers:
    """`optimizer` with its rate times `rate(step)`."""

    def make(module: nn.Module) -> Any:
        made = optimizer(module.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(made, rate)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return make


@healthy(quick=True)
def residuals_from_zero() -> Fit:
    """The last layer of every residual block starts at zero: those inside get no gradient at step 0."""
    blocks = []
    for _ in range(6):
        last = nn.Linear(64, 64)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        blocks.append(Residual(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), last)))
    return reads_digits(nn.Sequential(nn.Linear(PIXELS, 64), *blocks, nn.Linear(64, CLASSES)))


@healthy(quick=True)
def head_from_zero() -> Fit:
    """The head starts at zero: nothing at all flows back at step 0."""
    net = mlp(3)
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    return reads_digits(net)


class LoRA(nn.Module):
    """A frozen layer and a low-rank change to it that starts at zero (Hu et al. 2021)."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@healthy(quick=True)
def low_rank_adapters() -> Fit:
    """LoRA on every layer of a trained model: `down` gets exactly zero at step 0."""
    net = pretrained(mlp(3))
    net.fc1, net.fc2, net.fc3, net.head = (LoRA(layer) for layer in (net.fc1, net.fc2, net.fc3, net.head))
    return reads_digits(net, adam(5e-3))


@healthy()
def frozen_backbone() -> Fit:
    """All but the head is frozen with requires_grad_(False), and left out of the optimizer."""
    net = pretrained(mlp(3))
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    return reads_digits(net, lambda m: torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=1e-2))


class Unfreeze(L.Callback):
    """Gives the deeper groups their rate one after the other."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for number, group in enumerate(reversed(trainer.optimizers[0].param_groups)):
            group["lr"] = 3e-3 if batch_idx >= 40 * number else 0.0


@healthy()
def thawed_from_the_top() -> Fit:
    """Progressive unfreezing: the rate of each layer is 0 until its turn comes, the head first."""
    net = pretrained(mlp(3))
    fit = reads_digits(
        net, lambda m: torch.optim.Adam([{"params": c.parameters(), "lr": 0.0} for c in _own(m)], lr=3e-3)
    )
    fit.module.configure_callbacks = lambda: [Unfreeze()]  # type: ignore[method-assign]
    return fit


def _own(module: Any) -> list[nn.Module]:
    return [child for child in module.net.children() if any(True for _ in child.parameters())]


@healthy()
def layerwise_rates() -> Fit:
    """The rate falls by ten from each layer to the one before it: the first layer hardly moves, as intended."""

    def optimizers(module: Any) -> Any:
        groups = [{"params": layer.parameters(), "lr": 1e-2} for layer in _own(module)]
        for depth, group in enumerate(reversed(groups)):
            group["lr"] = 1e-2 * 0.1**depth
        return torch.optim.Adam(groups)

    return reads_digits(pretrained(mlp(3)), optimizers)


@healthy()
def fine_tuning_gently() -> Fit:
    """A trained model at a rate of 2e-4: the changes are small because they should be."""
    return reads_digits(pretrained(mlp(3), known=CLASSES), adam(2e-4), steps=250)


@healthy()
def warmed_up_from_zero() -> Fit:
    """The rate rises from exactly 0 over 60 steps."""
    return reads_digits(mlp(3), scheduled(lambda p: torch.optim.AdamW(p, lr=3e-3), lambda s: min(1.0, s / 60)))


@healthy()
def cosine_with_restarts() -> Fit:
    """The rate falls to 0 and jumps back every 50 steps: so do loss and gradients."""

    def rate(step: int) -> float:
        return 0.5 + 0.5 * math.cos(math.pi * (step % 50) / 50)

    return reads_digits(start(mlp(3), he), scheduled(lambda p: torch.optim.SGD(p, lr=0.3), rate), steps=200)


@healthy()
def one_cycle() -> Fit:
    """Up to twenty times the first rate and down to nearly nothing."""

    def optimizers(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=150)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return reads_digits(mlp(3), optimizers)


@healthy()
def orthogonal_tanh_fifty_deep() -> Fit:
    """Fifty tanh layers with orthogonal weights and small inputs (Pennington et al. 2017): the signal arrives."""
    net = start(mlp(50, 64, act=nn.Tanh), lambda weight: nn.init.orthogonal_(weight, gain=1.05))
    return reads_digits(net, adam(3e-4), steps=150)


@healthy()
def he_relu_twenty_deep() -> Fit:
    """Twenty plain ReLU layers with He's start."""
    return reads_digits(start(mlp(20), he), adam(5e-4))


@healthy()
def selu_sixteen_deep() -> Fit:
    """Sixteen SELU layers with LeCun's start: no norm, and none is needed (Klambauer et al. 2017)."""

    def lecun(weight: Tensor) -> Tensor:
        return nn.init.kaiming_normal_(weight, nonlinearity="linear")

    return reads_digits(start(mlp(16, act=nn.SELU), lecun), adam(5e-4))


@healthy()
def thirty_blocks_norm_first() -> Fit:
    """Thirty pre-norm residual blocks."""
    bodies = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(30)]
    return reads_digits(nn.Sequential(nn.Linear(PIXELS, 32), *map(Residual, bodies), nn.Linear(32, CLASSES)), steps=100)


class Highway(nn.Module):
    """Highway layer whose gate starts nearly shut, so that it starts as the identity (Srivastava et al. 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -3.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * torch.relu(self.body(x)) + (1 - gate) * x


@healthy()
def highway_twelve_deep() -> Fit:
    """Twelve highway layers that start as the identity: bodies get a twentieth of the signal at first."""
    stages = [nn.Linear(PIXELS, 48), *(Highway(48) for _ in range(12)), nn.Linear(48, CLASSES)]
    return reads_digits(nn.Sequential(*stages), adam(2e-3))


@healthy()
def large_weights_before_norms() -> Fit:
    """Weights a thousand times too large before batch norms: the output does not depend on their size."""
    return _rescaled(1e3)


@healthy()
def tiny_weights_before_norms() -> Fit:
    """Weights a thousand times too small before batch norms: huge gradients, and nothing wrong with the output."""
    return _rescaled(1e-2)


def _rescaled(factor: float) -> Fit:
    stages = OrderedDict(norm0=nn.BatchNorm1d(PIXELS), **dict(mlp(3, norm=nn.BatchNorm1d).named_children()))
    net = nn.Sequential(stages)
    with torch.no_grad():
        for layer in (net.fc1, net.fc2, net.fc3):
            layer.weight.mul_(factor)
    return reads_digits(net, adam(3e-3))


@healthy()
def embeddings_from_small() -> Fit:
    """GPT-2's start: weights of 0.02, and residual outputs smaller still."""
    net = GPT()
    for name, parameter in net.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.01 if name.endswith(("down.weight", "out.weight")) else 0.02)
    return reads_text(net, adam(3e-3))


@healthy()
def evaluated_norms() -> Fit:
    """A trained convolutional net is fine-tuned with its batch norms frozen in evaluation mode."""
    net = cnn((8, 16))
    for x, _ in draw((flat_digits()[0][0].unflatten(1, (1, 8, 8)), flat_digits()[0][1]), 30, 64):
        net(x)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign]
    return reads_digits(net, adam(1e-2), images=True)
