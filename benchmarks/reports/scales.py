"""Reports of starts, depths and inputs that are out of scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.reports.report import report
from benchmarks.zoo.case import Fit
from benchmarks.zoo.learner import Learner, adam, misfit, mistakes, regress, sgd
from benchmarks.zoo.material import CLASSES, PIXELS, digits, draw
from benchmarks.zoo.parts import Attention, cnn, mlp, normal, reads_digits, start


@report(
    "https://github.com/keras-team/keras/issues/255",
    "input_scale",
    fix="a division of floats",
    words="zero|\\b0\\b",
)
def images_rounded_to_zero(fixed: bool) -> Fit:
    """Pixels are scaled to [0, 1] in an array of integers: every pixel is 0."""
    (images, labels), held = digits()
    seen = images if fixed else torch.zeros_like(images)
    net = cnn((8, 16))
    return Fit(Learner(net, optimizers=adam(1e-2)), draw((seen, labels), 150, 32), mistakes(net, held))


@report(
    "https://github.com/cbovar/ConvNetSharp/issues/154",
    "input_scale",
    "dead",
    "divergence",
    fix="inputs scaled to about 1",
)
def patterns_of_eleven_and_a_hundred(fixed: bool) -> Fit:
    """Two patterns with values of 11 and 100 at a rate of 0.1: soon the output is the same for both."""
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(6, 6, 2))
    net.add_module("act1", nn.ReLU())
    net.add_module("conv2", nn.Conv2d(6, 6, 2))
    net.add_module("act2", nn.ReLU())
    net.add_module("flat", nn.Flatten())
    net.add_module("fc1", nn.Linear(210, 100))
    net.add_module("fc2", nn.Linear(100, 2))
    labels = torch.randint(2, (150, 8))
    values = torch.where(labels == 1, 100.0, 11.0)
    inputs = values[..., None, None, None].expand(-1, -1, 6, 9, 7) * (1 + 0.02 * torch.randn(150, 8, 6, 9, 7))
    if fixed:
        inputs = (inputs - 55) / 45
    batches = list(zip(inputs, labels, strict=True))
    held = (inputs[:8].flatten(0, 1), labels[:8].flatten())
    return Fit(Learner(net, optimizers=sgd(0.1)), batches, mistakes(net, held))


@report(
    "https://github.com/jaredleekatzman/DeepSurv/issues/14",
    "input_scale",
    "divergence",
    "nonfinite",
    fix="every feature scaled to [0, 1]",
    words="normali|input",
)
def clinical_features_as_they_come(fixed: bool) -> Fit:
    """Features in days and counts, up to tens of thousands: the first loss is 3e10, the second NaN."""
    raw = torch.rand(4096, 6) * torch.tensor([20000.0, 3000.0, 100.0, 10.0, 1.0, 1.0])
    low, high = raw.min(0).values, raw.max(0).values
    scaled = (raw - low) / (high - low)
    risk = (2 * scaled[:, 0] - scaled[:, 2] + scaled[:, 4]).unsqueeze(-1)
    net = nn.Sequential(nn.Linear(6, 25), nn.ReLU(), nn.Linear(25, 25), nn.ReLU(), nn.Linear(25, 1))
    picks = torch.randint(4096, (150, 64))
    inputs = scaled if fixed else raw
    batches = [(inputs[p], risk[p]) for p in picks]
    return Fit(Learner(net, regress, sgd(1e-2)), batches, misfit(net, (inputs, risk)))


@report(
    "https://github.com/adambielski/siamese-triplet/issues/17",
    "vanishing",
    "exploding",
    "dead",
    fix="kaiming initialization for ReLU",
)
def relu_with_a_small_start(fixed: bool) -> Fit:
    """Convolutions with ReLU do not leave a loss of 2.3: they started far too small for it."""
    net = cnn((16, 16, 32, 32), norm=None)
    fill = (lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu")) if fixed else normal(1e-3)
    return reads_digits(start(net, fill), sgd(0.05, momentum=0.9), images=True, steps=200)


@report(
    "https://github.com/MichalDanielDobrzanski/DeepLearningPython/issues/13",
    "exploding",
    "divergence",
    "dead",
    fix="a far smaller start and a rate of 0.01",
)
def relu_with_the_start_of_sigmoids(fixed: bool) -> Fit:
    """ReLU in the place of sigmoid, with weights of unit variance and a rate of 3: a tenth is right, as by chance."""
    net = mlp(2, 30)
    start(net, normal(0.1 if fixed else 1.0))
    return reads_digits(net, sgd(0.1 if fixed else 3.0), steps=200)


class _GCN(nn.Module):
    """Graph convolutions over the grid of pixels: each layer averages neighbours and mixes features."""

    def __init__(self, depth: int, width: int = 16, *, residual: bool) -> None:
        super().__init__()
        self.first = nn.Linear(1, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head, self.residual = nn.Linear(PIXELS * width, CLASSES), residual
        place = torch.arange(PIXELS)
        row, column = place // 8, place % 8
        near = ((row[:, None] - row).abs() + (column[:, None] - column).abs() <= 1).float()
        self.register_buffer("near", near / near.sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x[..., None]))
        for layer in self.layers:
            new = torch.relu(layer(self.near @ x))
            x = x + new if self.residual else new
        return self.head(x.flatten(1))


@report(
    "https://github.com/miafei/NodeNorm/issues/2",
    "vanishing",
    fix="residual connections",
    words="residual",
)
def graph_convolutions_sixteen_deep(fixed: bool) -> Fit:
    """Graph convolutions of more than eight layers without residual connections do not train."""
    net = _GCN(16, residual=fixed)
    return reads_digits(net, adam(1e-3), steps=200)


@report(
    "https://github.com/pytorch/pytorch/issues/55270",
    "vanishing",
    "divergence",
    "stalled",
    fix="norms before the sublayers",
)
def deep_post_norm_transformer(fixed: bool) -> Fit:
    """nn.TransformerEncoder puts norms after the sum: with 14 layers and no warm-up it does not train."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=fixed)
            self.embed = nn.Linear(8, 32)
            self.place = nn.Parameter(0.02 * torch.randn(8, 32))
            self.body = nn.TransformerEncoder(layer, 14, enable_nested_tensor=False)
            self.head = nn.Linear(32, CLASSES)
            for p in self.body.parameters():
                if p.dim() > 1:
                    nn.init.xavier_uniform_(p)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.embed(x.unflatten(1, (8, 8))) + self.place).mean(1))

    return reads_digits(Net(), adam(3e-3), steps=150)


class _Unscaled(nn.Module):
    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        width = 64
        self.embed, self.place = nn.Linear(8, width), nn.Parameter(torch.randn(8, width))
        self.attention = Attention(width, 1, scale=None if scaled else 1.0, causal=False)
        for layer in (self.attention.query, self.attention.key):
            nn.init.normal_(layer.weight, std=width**-0.5)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unflatten(1, (8, 8))) + self.place
        return self.head((x + self.attention(self.norm(x))).mean(1))


@report(
    "https://github.com/PAIR-code/tiny-transformers/issues/71",
    "act_blowup",
    fix="scores divided by the root of the width",
    layers=("net.attention",),
    words="sqrt|root|scale",
)
def scores_not_divided_by_the_root(fixed: bool) -> Fit:
    """Attention scores are not divided by the root of the head's width: the softmax saturates."""
    return reads_digits(_Unscaled(scaled=fixed), adam(1e-2), steps=200)
