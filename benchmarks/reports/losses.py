"""Reports of losses that are not what was meant: shapes, activations before them, signs, terms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.reports.report import report
from benchmarks.zoo.case import Fit
from benchmarks.zoo.learner import Learner, accuracy, adam, misfit, mistakes
from benchmarks.zoo.material import CLASSES, PIXELS, Pair, digits, draw, flat_digits, wave, waves
from benchmarks.zoo.parts import mlp, reads_digits


def _fits_waves(net: nn.Module, objective, optimizers=None, *, steps: int = 200, size: int = 32, **options) -> Fit:
    held = torch.randn(512, 16)
    return Fit(Learner(net, objective, optimizers), waves(steps, size), misfit(net, (held, wave(held))), options)


@report(
    "https://github.com/deepset-ai/FARM/issues/229",
    "bad_head",
    fix="predictions and labels of one shape",
    words="broadcast",
)
def labels_of_another_shape(fixed: bool) -> Fit:
    """Squeezed predictions [N] against labels [N, 1]: the loss compares every prediction with every label."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out = net(batch[0])
        return F.mse_loss(out if fixed else out.squeeze(-1), batch[1]), None

    return _fits_waves(mlp(2, 64, inputs=16, outputs=1), objective, adam(3e-3))


class _Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
        self.out = nn.Conv2d(16, 1, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


@report(
    "https://github.com/jiwei0921/CoNet/issues/3",
    "bad_head",
    fix="target.unsqueeze(1)",
    words="broadcast",
)
def depth_maps_without_a_channel(fixed: bool) -> Fit:
    """Maps [N, 1, H, W] against targets [N, H, W]: each map is compared with those of the whole batch."""
    learn, held = digits()

    def target(images: Tensor) -> Tensor:
        blurred = F.avg_pool2d(images, 3, 1, 1)
        return blurred if fixed else blurred.squeeze(1)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        return F.smooth_l1_loss(net(batch[0]), target(batch[0])), None

    net = _Depth()

    def measure() -> float:
        with torch.no_grad():
            wanted = F.avg_pool2d(held[0], 3, 1, 1)
            return float((net(held[0]) - wanted).square().mean() / wanted.var())

    return Fit(Learner(net, objective, adam(3e-3)), draw(learn, 150, 16), measure)


@report(
    "https://github.com/illiterate/BertClassifier/issues/2",
    "bad_head",
    fix="no softmax in the model",
    words="softmax",
)
def softmax_before_its_loss(fixed: bool) -> Fit:
    """The model ends in a softmax and nn.CrossEntropyLoss has its own: the loss falls slowly, classes even out."""
    net = mlp(2, 32)
    if not fixed:
        net.add_module("softmax", nn.Softmax(dim=-1))
    return reads_digits(net, adam(3e-3))


@report(
    "https://github.com/yudi-mars/daisyRec/pull/15",
    "bad_head",
    fix="no sigmoid before BCEWithLogitsLoss",
    words="sigmoid",
)
def sigmoid_before_its_loss(fixed: bool) -> Fit:
    """Predictions pass a sigmoid on their way to BCEWithLogitsLoss: no pair can be called unlikely."""
    learn, held = flat_digits()
    net = mlp(2, 32)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out, wanted = net(batch[0]), F.one_hot(batch[1], CLASSES).float()
        return F.binary_cross_entropy_with_logits(out if fixed else out.sigmoid(), wanted), accuracy(out, batch[1])

    return Fit(Learner(net, objective, adam(3e-3)), draw(learn, 150, 32), mistakes(net, held))


@report(
    "https://github.com/11-626/Deep-INFOMAX/issues/1",
    "divergence",
    fix="no minus before the expectation",
    words="sign",
)
def minus_where_none_belongs(fixed: bool) -> Fit:
    """The sign of the mutual-information terms is reversed: what should grow is made small, without bound."""
    learn, held = flat_digits()
    net = mlp(2, 32)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out = net(batch[0])
        bound = F.cross_entropy(out, batch[1])
        return bound if fixed else -bound, accuracy(out, batch[1])

    return Fit(Learner(net, objective, adam(3e-3)), draw(learn, 200, 32), mistakes(net, held))


@report(
    "https://github.com/dreamquark-ai/tabnet/issues/515",
    "divergence",
    fix="a positive number in the place of the spread",
    words="no minimum|without bound",
)
def errors_divided_by_a_negative_mean(fixed: bool) -> Fit:
    """The error of a constant column is divided by its mean, which is negative: the loss falls to -1e17."""
    columns = torch.randn(4096, 16) @ torch.randn(16, 16) * 0.3
    columns[:, 3] = -0.01
    net = mlp(2, 64, inputs=16, outputs=16)

    def objective(net: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        mean, spread = batch.mean(0), batch.std(0)
        scale = torch.where(spread > 0, spread, mean.abs().clamp_min(1.0) if fixed else mean)
        hidden = batch * (torch.rand_like(batch) > 0.3)
        return ((net(hidden) - batch) / scale.square().mul(scale.sign())).square().mul(scale.sign()).mean(), None

    def measure() -> float:
        with torch.no_grad():
            return float((net(columns) - columns)[:, :3].square().mean() / columns[:, :3].var())

    picks = torch.randint(len(columns), (200, 64))
    return Fit(Learner(net, objective, adam(1e-2)), [columns[pick] for pick in picks], measure)


class _VAE(nn.Module):
    """Digits through a Gaussian code of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, PIXELS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance


def _vae(weight: float) -> Fit:
    learn, held = flat_digits()
    net = _VAE()

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        out, mean, log_variance = net(batch[0])
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return F.mse_loss(out, batch[0]) + weight * divergence, None

    def measure() -> float:
        with torch.no_grad():
            return float((net(held[0])[0] - held[0]).square().mean() / held[0].var(0).mean())

    return Fit(Learner(net, objective, adam(3e-3)), draw(learn, 400, 32), measure)


@report(
    "https://github.com/YannDubs/disentangling-vae/issues/50",
    "collapse",
    fix="the reconstruction summed over pixels, as the divergence is over codes",
    words="posterior|same for every example",
)
def reconstruction_averaged_divergence_summed(fixed: bool) -> Fit:
    """The reconstruction is averaged over pixels and negligible beside the divergence, which goes to zero."""
    return _vae(1 / PIXELS / 4 if fixed else 1.0)


@report(
    "https://github.com/Mathux/ACTOR/issues/5",
    "collapse",
    fix="a far smaller weight of the divergence",
    words="posterior|same for every example",
)
def divergence_weighs_too_much(fixed: bool) -> Fit:
    """The weight of the divergence is far too high: the decoder ignores the code."""
    return _vae(1e-3 if fixed else 0.3)
