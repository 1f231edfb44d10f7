"""Numbers that leave the range or the grid of their type: NaN, infinity, fp16 underflow."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, unhealthy
from benchmarks.zoo.learner import Learner, accuracy, adam, classify, misfit, mistakes, regress, sgd
from benchmarks.zoo.material import CLASSES, PIXELS, Pair, digits, draw, flat_digits, wave, waves
from benchmarks.zoo.parts import Call, Times, he, mlp, reads_digits, start


@unhealthy("nonfinite", onset=50, quick=True)
def missing_value_in_a_batch(fixed: bool) -> Fit:
    """Batch 50 holds a missing value (NaN): one step carries it into every weight."""
    learn, held = flat_digits()
    batches = draw(learn, 90, 32)
    if not fixed:
        inputs = batches[50][0].clone()
        inputs[3, 20] = float("nan")
        batches[50] = (inputs, batches[50][1])
    net = mlp(3)
    return Fit(Learner(net), batches, mistakes(net, held))


@unhealthy("nonfinite")
def logarithm_of_zero(fixed: bool) -> Fit:
    """log(softmax) in two steps, with logits that start large: a probability underflows, and its log is -inf."""
    net = start(mlp(3), he)
    with torch.no_grad():
        net.head.weight.mul_(100)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        logs = logits.log_softmax(-1) if fixed else logits.softmax(-1).log()
        return F.nll_loss(logs, batch[1]), accuracy(logits, batch[1])

    return reads_digits(net, objective=objective)


@unhealthy("nonfinite", "net.head", "net.act2")
def root_of_zero(fixed: bool) -> Fit:
    """Distances of embeddings as sqrt(sum of squares), the one to itself among them: its slope at 0 is NaN."""
    eps = 1e-4 if fixed else 0.0

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        squares = (logits[:, None] - logits).square().sum(-1)
        alike = (batch[1][:, None] == batch[1]).float()
        pull = ((squares + eps).sqrt() * alike).mean()
        return F.cross_entropy(logits, batch[1]) + 0.1 * pull, accuracy(logits, batch[1])

    return reads_digits(mlp(2), objective=objective)


@unhealthy("nonfinite")
def adam_epsilon_in_half(fixed: bool) -> Fit:
    """fp16 weights under Adam: its eps of 1e-8 is 0 in fp16, and where a gradient is 0 the update is 0 / 0."""
    options: dict[str, Any] = {} if fixed else {"precision": "16-true"}
    return reads_digits(mlp(3), adam(1e-3), **options)


@unhealthy("nonfinite", "net.fc3.fc", "net.fc2", "net.fc3.scale", "net.act2", "net.fc3")
def half_precision_overflow(fixed: bool) -> Fit:
    """fp16 activations multiplied by 1e5 inside the net: 65,504 is the most that fp16 holds."""
    net = start(mlp(3), he)
    net.fc3 = nn.Sequential(OrderedDict(scale=Times(1.0 if fixed else 1e5), fc=net.fc3))
    options: dict[str, Any] = {} if fixed else {"precision": "16-true"}
    return reads_digits(net, sgd(0.05), **options)


@unhealthy("nonfinite", "net.rate", "net.exp")
def exponential_of_raw_counts(fixed: bool) -> Fit:
    """A rate as exp(linear) of inputs in raw counts: exp overflows float32 beyond 88."""
    factor = 1.0 if fixed else 2000.0
    net = nn.Sequential(OrderedDict(rate=nn.Linear(16, 8), exp=Call(torch.exp), head=nn.Linear(8, 1)))
    batches = [(factor * x, y) for x, y in waves(150, 64)]
    points = torch.randn(512, 16)
    return Fit(Learner(net, regress, adam(1e-2)), batches, misfit(net, (factor * points, wave(points))))


class Masked(nn.Module):
    """Attention pooling over the rows of a digit; blank rows are masked."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.rows, self.score, self.head = nn.Linear(8, 32), nn.Linear(32, 1), nn.Linear(32, CLASSES)
        self.fixed = fixed

    def forward(self, images: Tensor) -> Tensor:
        rows = images.squeeze(1)
        seen = torch.relu(self.rows(rows))
        scores = self.score(seen).squeeze(-1)
        blank = rows.sum(-1) == 0
        scores = scores.masked_fill(blank, -1e9 if self.fixed else float("-inf"))
        return self.head((scores.softmax(-1)[..., None] * seen).sum(1))


@unhealthy("nonfinite", "net.score", "net.rows", "net.head", onset=40)
def attention_over_nothing(fixed: bool) -> Fit:
    """An empty image in batch 40: all of its rows are masked with -inf, and the softmax of nothing is NaN."""
    learn, held = digits()
    batches = draw(learn, 80, 32)
    inputs = batches[40][0].clone()
    inputs[0] = 0
    batches[40] = (inputs, batches[40][1])
    net = Masked(fixed)
    return Fit(Learner(net, classify, adam(5e-3)), batches, mistakes(net, held))


class Standardise(nn.Module):
    """Columns of a batch to zero mean and unit variance; `eps` added to the standard deviation."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + self.eps)


@unhealthy("nonfinite", "net.standardise", "net.fc1")
def division_by_no_spread(fixed: bool) -> Fit:
    """A norm by hand without an epsilon over pixels that are blank in every image: 0 / 0 from the first step on."""
    stages = OrderedDict(standardise=Standardise(1e-1 if fixed else 0.0), **dict(mlp(2).named_children()))
    return reads_digits(nn.Sequential(stages))


@unhealthy("underflow", quick=True)
def half_precision_without_scaler(fixed: bool) -> Fit:
    """fp16 throughout and a loss averaged over far too much: gradients fall under 6e-8, the least that fp16 holds."""
    return _small_losses(fixed, {"precision": "16-true"})


def _small_losses(fixed: bool, options: dict[str, Any], *, cast: bool = False) -> Fit:
    """A loss of 3e-6 of its usual size; the rate makes up for it, so that in float32 all is well."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        with torch.autocast("cpu", torch.float16, enabled=cast and not fixed):
            logits = net(batch[0])
            loss = F.cross_entropy(logits, batch[1])
        return loss * 3e-6, accuracy(logits, batch[1])

    net = start(mlp(4, 64), he)
    return reads_digits(net, sgd(0.1 / 3e-6), objective=objective, **({} if fixed else options))


@unhealthy("underflow")
def autocast_without_scaler(fixed: bool) -> Fit:
    """torch.autocast to fp16 and no GradScaler: the backward pass underflows though the weights are float32."""
    return _small_losses(fixed, {}, cast=True)


@unhealthy("underflow")
def half_precision_autoencoder(fixed: bool) -> Fit:
    """fp16 and a squared error averaged over pixels, batch and channels: most of the gradient underflows to zero."""
    learn, held = flat_digits()
    net = start(mlp(3, 64, outputs=PIXELS), he)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out = net(batch[0])
        return F.mse_loss(out, batch[1]) / 2**15, None

    batches = [(x, x) for x, _ in draw(learn, 150, 32)]
    options: dict[str, Any] = {} if fixed else {"precision": "16-true"}
    return Fit(Learner(net, objective, sgd(2.0**15)), batches, misfit(net, (held[0], held[0])), options)
