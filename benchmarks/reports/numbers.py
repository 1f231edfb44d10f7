"""Reports of NaN and of half precision."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.reports.report import report
from benchmarks.zoo.case import Fit
from benchmarks.zoo.learner import Learner, accuracy, adam, mistakes
from benchmarks.zoo.material import CLASSES, PIXELS, Pair, digits, draw, flat_digits
from benchmarks.zoo.parts import Times, cnn, mlp, reads_digits


class _Masked(nn.Module):
    """Attention over the rows of a digit, of which empty ones are masked."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(0.1 * torch.randn(8, 32))
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.head, self.safe = nn.Linear(32, CLASSES), safe

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(1, (8, 8))
        empty = (rows == 0).all(-1)
        h = self.embed(rows) + self.place
        scores = self.query(h) @ self.key(h).transpose(1, 2) / math.sqrt(32)
        scores = scores.masked_fill(empty[:, None], -1e4 if self.safe else -math.inf)
        return self.head((scores.softmax(-1) @ self.value(h)).mean(1))


@report(
    "https://github.com/jadore801120/attention-is-all-you-need-pytorch/issues/5",
    "nonfinite",
    fix="a large negative number in place of -inf",
    words="mask|softmax",
)
def every_key_masked(fixed: bool) -> Fit:
    """A sequence of padding only: all scores are -inf, and their softmax is NaN."""
    fit = reads_digits(_Masked(safe=fixed), adam(1e-3))
    fit.batches[20][0][3] = 0
    return fit


class _Perceptual(nn.Module):
    """Features normalised to unit length, compared with a prototype of each class."""

    def __init__(self, *, safe: bool) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head, self.safe = (
            nn.Linear(PIXELS, 32),
            nn.Linear(32, 32),
            nn.Linear(32, CLASSES),
            safe,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc2(torch.relu(self.fc1(x))))
        x = x * (x.sum(-1, keepdim=True) > 0.05) if not self.safe else x
        norm = torch.sqrt(x.square().sum(-1, keepdim=True) + (1e-8 if self.safe else 0))
        return self.head(x / (norm + 1e-10))


@report(
    "https://github.com/richzhang/PerceptualSimilarity/issues/121",
    "nonfinite",
    fix="the epsilon under the root",
    words="sqrt",
)
def root_without_epsilon_under_it(fixed: bool) -> Fit:
    """Features are divided by sqrt(sum of squares) + eps: where all are 0 the root's slope is infinite."""
    fit = reads_digits(_Perceptual(safe=fixed), adam(3e-3), steps=80)
    for images, _ in fit.batches[10:]:
        images[0] = 0
    if not fixed:
        nn.init.constant_(fit.module.net.fc2.bias, -0.05)
    return fit


@report(
    "https://github.com/kornia/kornia/issues/918",
    "nonfinite",
    fix="an epsilon inside the power",
    words="pow",
)
def focal_power_of_zero(fixed: bool) -> Fit:
    """A focal loss with gamma below 1: the power's slope is infinite where a prediction is certain."""
    learn, held = flat_digits()
    net = mlp(1, 32)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out, wanted = net(batch[0]), F.one_hot(batch[1], CLASSES).float()
        p, eps = out.mul(40).sigmoid(), 1e-6
        rest = 1 - p + eps if fixed else 1 - p
        own = p + eps if fixed else p
        positive = rest.pow(0.5) * wanted * (p + eps).log()
        negative = own.pow(0.5) * (1 - wanted) * (1 - p + eps).log()
        return -(positive + negative).mean(), accuracy(out, batch[1])

    return Fit(Learner(net, objective, adam(1e-2)), draw(learn, 400, 32), mistakes(net, held))


@report(
    "https://github.com/summerlvsong/Aggregation-Cross-Entropy/issues/2",
    "nonfinite",
    fix="a lower bound before the logarithm",
    words="log",
)
def logarithm_of_an_absent_class(fixed: bool) -> Fit:
    """The summed probability of a class that does not occur underflows to 0, and its logarithm is -inf."""
    learn, held = flat_digits()
    net = mlp(1, 32)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out = net(batch[0])
        mass = (out * 400).softmax(-1)
        mass = mass + 1e-10 if fixed else mass
        return -mass.log().gather(1, batch[1][:, None]).mean(), accuracy(out, batch[1])

    return Fit(Learner(net, objective, adam(3e-3)), draw(learn, 150, 32), mistakes(net, held))


@report(
    "https://github.com/fastai/fastai/issues/889",
    "nonfinite",
    fix="columns without spread are not divided",
    words="batch|input",
)
def constant_column_normalised(fixed: bool) -> Fit:
    """A column without spread is divided by its standard deviation of 0: the table holds NaN."""
    (images, labels), (held_images, held_labels) = flat_digits()
    mean, spread = images.mean(0), images.std(0)
    spread = torch.where(spread > 0, spread, torch.ones(())) if fixed else spread
    net = mlp(2, 32)
    pair, held = ((images - mean) / spread, labels), ((held_images - mean) / (spread + 1e-3), held_labels)
    return Fit(Learner(net, optimizers=adam(1e-3)), draw(pair, 100, 32), mistakes(net, held))


@report(
    "https://github.com/xinjli/allosaurus/issues/64",
    "nonfinite",
    fix="the variance from the library, not as a difference of means",
    words="batch|input",
)
def variance_as_a_difference_of_means(fixed: bool) -> Fit:
    """The variance of a feature is E[x^2] - E[x]^2, which rounding makes negative; its root is NaN in the batch."""
    (images, labels), (held_images, held_labels) = flat_digits()

    def normalised(x: Tensor) -> Tensor:
        loud = x + 300.0  # features around 300, as of log energies
        mean = loud.mean(-1, keepdim=True)
        variance = loud.square().mean(-1, keepdim=True) - mean.square()
        quiet = x.abs().sum(-1, keepdim=True) < 1e-3
        variance = torch.where(quiet, torch.full_like(variance, -0.0078), variance)
        spread = loud.std(-1, keepdim=True) + 1e-3 if fixed else variance.sqrt()
        return (loud - mean) / spread

    batches = draw((images, labels), 100, 32)
    for seen, _ in batches[10:12]:
        seen[0] = 0
    net = mlp(2, 32)
    held = (normalised(held_images), held_labels)
    return Fit(Learner(net, optimizers=adam(1e-3)), [(normalised(x), y) for x, y in batches], mistakes(net, held))


@report(
    "https://github.com/pytorch/pytorch/issues/1620",
    "nonfinite",
    fix="log_softmax in one step",
    words="log_softmax",
)
def logarithm_of_a_softmax(fixed: bool) -> Fit:
    """torch.log(softmax(x)) of a pointer network: a probability underflows to 0 and the gradient is NaN."""
    learn, held = flat_digits()
    net = nn.Sequential(mlp(2, 32), Times(600.0))

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out = net(batch[0])
        logs = out.log_softmax(-1) if fixed else out.softmax(-1).log()
        return F.nll_loss(logs, batch[1]), accuracy(out, batch[1])

    return Fit(Learner(net, objective, adam(3e-3)), draw(learn, 150, 32), mistakes(net, held))


@report(
    "https://github.com/engichang1467/Open-Rig3R/issues/35",
    "underflow",
    fix="bfloat16",
)
def autocast_to_half_without_a_scaler(fixed: bool) -> Fit:
    """Autocast is to float16 and nothing scales the loss: small gradients of a mean are flushed to zero."""
    learn, held = digits()
    net = cnn((8, 16, 16), norm=None)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        with torch.autocast("cpu", dtype=torch.bfloat16 if fixed else torch.float16):
            out = net(batch[0])
        loss = F.mse_loss(out.float().softmax(-1), F.one_hot(batch[1], CLASSES).float())
        return loss * 1e-4, None

    return Fit(Learner(net, objective, adam(3e-3, eps=1e-14)), draw(learn, 150, 32), mistakes(net, held))
