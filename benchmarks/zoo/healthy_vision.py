"""Healthy readers of digits: the usual networks, in the usual and the less usual precisions and batch sizes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, healthy
from benchmarks.zoo.learner import Learner, accuracy, adam, misfit, mistakes, regress, sgd
from benchmarks.zoo.material import CLASSES, Pair, digits, draw, flat_digits
from benchmarks.zoo.parts import Block, Residual, cnn, he, mlp, reads_digits, start


@healthy(quick=True)
def plain_mlp() -> Fit:
    """Three ReLU layers under Adam."""
    return reads_digits(mlp(3))


@healthy()
def plain_cnn() -> Fit:
    """Convolutions with batch norm: the biases before the norms have no gradient but rounding errors."""
    return reads_digits(cnn((8, 16, 16)), adam(3e-3), images=True)


@healthy()
def residual_cnn() -> Fit:
    """Residual blocks of convolutions, changed in place."""
    bodies = [
        nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(inplace=True))
        for _ in range(4)
    ]
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES))
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), *map(Residual, bodies), *tail)
    return reads_digits(net, sgd(0.1, momentum=0.9), images=True)


@healthy()
def dropout_and_stochastic_depth() -> Fit:
    """Half of the units and a third of the blocks are left out at each step."""
    bodies = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64)) for _ in range(4)]
    blocks = [Residual(body, keep=0.67) for body in bodies]
    return reads_digits(nn.Sequential(nn.Linear(64, 64), *blocks, nn.Linear(64, CLASSES)), adam(2e-3))


class UNet(nn.Module):
    """Noisy digits [N, 1, 8, 8] -> clean ones, with a skip from each resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.relu(self.down1(x))
        coarse = F.relu(self.bottom(F.relu(self.down2(fine))))
        return self.out(torch.cat([F.relu(self.up(coarse)), fine], dim=1))


@healthy()
def unet_denoiser() -> Fit:
    """A U-Net: the skips carry nearly all at first, and the bottom gets little."""
    learn, held = digits()
    noisy = [(x + 0.5 * torch.randn_like(x), x) for x, _ in draw(learn, 150, 32)]
    net = UNet()
    clean = held[0]
    return Fit(Learner(net, regress, adam(3e-3)), noisy, misfit(net, (clean + 0.5 * torch.randn_like(clean), clean)))


class ViT(nn.Module):
    """Rows of a digit as tokens, two transformer blocks, the mean as the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Linear(8, 32), nn.Parameter(0.02 * torch.randn(8, 32))
        self.blocks = nn.Sequential(*(Block(32, causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patch(images.squeeze(1)) + self.place)).mean(1))


@healthy()
def vision_transformer() -> Fit:
    """Attention over the rows of a digit: keys have a bias that no loss depends on."""
    return reads_digits(ViT(), adam(3e-3), images=True)


@healthy()
def batches_of_one() -> Fit:
    """One example a step: gradients jump by a factor of a hundred, and many are nearly zero once it is right."""
    return reads_digits(start(mlp(2), he), sgd(0.02), steps=600, size=1)


@healthy()
def bfloat16_weights() -> Fit:
    """Everything in bfloat16 at a rate that its three digits can follow."""
    return reads_digits(mlp(3), sgd(0.1, momentum=0.9), precision="bf16-true")


@healthy()
def bfloat16_mixed() -> Fit:
    """bf16-mixed: weights in float32, activations in bfloat16."""
    return reads_digits(mlp(3), adam(2e-3), precision="bf16-mixed")


@healthy(quick=True)
def scaler_backs_off() -> Fit:
    """fp16 with a GradScaler that starts far too high: the first steps overflow and are skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    return reads_digits(mlp(3), adam(2e-3), plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


@healthy()
def weight_normalised() -> Fit:
    """Directions and lengths of weights are parameters of their own."""
    net = mlp(3)
    for layer in (net.fc1, net.fc2, net.fc3):
        nn.utils.parametrizations.weight_norm(layer)
    return reads_digits(net, adam(3e-3))


@healthy()
def learnt_by_heart() -> Fit:
    """32 images learnt until nothing is left to learn: gradients rightly fall by many orders of magnitude."""
    learn, _ = flat_digits()
    few = (learn[0][:32], learn[1][:32])
    net = start(mlp(3), he)
    return Fit(Learner(net, optimizers=adam(5e-3)), [few] * 250, mistakes(net, few))


@healthy()
def pruned() -> Fit:
    """Four of five weights are masked to zero for good: their gradients are zeros."""
    net = mlp(3, 96)
    for layer in (net.fc1, net.fc2, net.fc3):
        nn.utils.prune.random_unstructured(layer, "weight", amount=0.8)
    return reads_digits(net, adam(3e-3))


@healthy()
def quantised_with_bypass() -> Fit:
    """Activations rounded to eight levels with a straight-through estimator."""

    class Round(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clamp(0, 1)
            return x + (torch.round(7 * x) / 7 - x).detach()

    return reads_digits(mlp(3, act=Round), adam(3e-3))


@healthy()
def log_softmax_before_cross_entropy() -> Fit:
    """log_softmax before a cross entropy: superfluous, but it changes nothing (it is idempotent)."""
    net = mlp(3)
    net.log_softmax = nn.LogSoftmax(dim=-1)
    return reads_digits(net, adam(2e-3))


@healthy()
def smoothed_and_mixed() -> Fit:
    """Label smoothing and mixup: the loss cannot come near zero."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        inputs, targets = batch
        share = 0.7 + 0.3 * float(torch.rand(()))
        other = torch.randperm(len(inputs))
        logits = net(share * inputs + (1 - share) * inputs[other])
        losses = [F.cross_entropy(logits, t, label_smoothing=0.1) for t in (targets, targets[other])]
        return share * losses[0] + (1 - share) * losses[1], accuracy(logits, targets)

    return reads_digits(mlp(3), adam(3e-3), objective=objective)


@healthy()
def noisy_labels_rare_classes() -> Fit:
    """A fifth of the labels is wrong, and two of the ten classes hold nine tenths of the examples."""
    learn, held = flat_digits()
    keep = (learn[1] < 2) | (torch.rand(len(learn[1])) < 0.03)
    inputs, labels = learn[0][keep], learn[1][keep].clone()
    wrong = torch.rand(len(labels)) < 0.2
    labels[wrong] = torch.randint(CLASSES, (int(wrong.sum()),))
    common = held[1] < 2
    net = mlp(2)
    batches = draw((inputs, labels), 150, 32)
    return Fit(Learner(net, optimizers=adam(2e-3)), batches, mistakes(net, (held[0][common], held[1][common])))


@healthy()
def two_labels_at_once() -> Fit:
    """Binary cross entropy of ten logits behind no sigmoid, as it should be."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        return F.binary_cross_entropy_with_logits(logits, F.one_hot(batch[1], 10).float()), accuracy(logits, batch[1])

    return reads_digits(mlp(3), adam(3e-3), objective=objective)


@healthy()
def accumulated_and_clipped() -> Fit:
    """Four micro-batches a step, clipped at a norm that half of the steps reach."""
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}
    return reads_digits(start(mlp(3), he), sgd(0.1, momentum=0.9), steps=480, size=16, **options)


@healthy()
def grouped_and_gated_convolutions() -> Fit:
    """Depthwise convolutions with squeeze-and-excitation gates, started half open."""

    class Squeeze(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.gate(x.mean((2, 3))))[..., None, None]

    def stage(width: int) -> nn.Module:
        depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        return Residual(nn.Sequential(depthwise, nn.GroupNorm(4, width), nn.SiLU(), Squeeze(width)))

    stages = OrderedDict(
        stem=nn.Conv2d(1, 16, 3, padding=1), stage1=stage(16), mix=nn.Conv2d(16, 16, 1), stage2=stage(16)
    )
    tail = OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(16, CLASSES))
    return reads_digits(nn.Sequential(OrderedDict(**stages, **tail)), adam(1e-2), images=True)
