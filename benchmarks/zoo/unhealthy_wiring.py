"""Layers that the gradient does not reach, and parameters that the optimizer does not."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning as L
from benchmarks.zoo.case import Fit, unhealthy
from benchmarks.zoo.learner import Learner, Optimizers, accuracy, adam, misfit, mistakes, regress
from benchmarks.zoo.material import CLASSES, PIXELS, Pair, draw, flat_digits, wave, waves
from benchmarks.zoo.parts import GPT, Residual, layers, mlp, reads_digits, reads_text


class TwoStage(nn.Module):
    """Encoder, something between, classifier."""

    def __init__(self, between: Any, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Linear(PIXELS, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.relu(self.encoder(x)))
        return self.head(torch.relu(self.between(x)))


BEFORE = ("net.encoder", "net.middle")


@unhealthy("disconnected", *BEFORE, quick=True)
def detached_features(fixed: bool) -> Fit:
    """A detach() left over from debugging: the encoder keeps its random weights."""
    return reads_digits(TwoStage((lambda x: x) if fixed else (lambda x: x.detach()), width=8), adam(1e-2))


@unhealthy("disconnected", *BEFORE)
def codes_by_comparison(fixed: bool) -> Fit:
    """Features turned into bits by a comparison: what it returns has no way back, and the encoder stays random."""

    def code(x: Tensor) -> Tensor:
        hard, x = (x > 0).float(), x.clamp(-1, 1)
        return x + (hard - x).detach() if fixed else hard

    return reads_digits(TwoStage(code, width=16), adam(1e-2))


@unhealthy("disconnected", *BEFORE)
def round_trip_through_numpy(fixed: bool) -> Fit:
    """Features standardised with numpy on the way: the graph ends where the array begins."""

    def standardise(x: Tensor) -> Tensor:
        if fixed:
            return (x - x.mean(0)) / (x.std(0) + 1e-3)
        array = x.detach().numpy()
        return torch.from_numpy((array - array.mean(0)) / (array.std(0) + 1e-3))

    return reads_digits(TwoStage(standardise, width=8), adam(1e-2))


class NoGradEmbedding(nn.Module):
    """A GPT whose embeddings are read under no_grad."""

    def __init__(self, gpt: GPT, fixed: bool) -> None:
        super().__init__()
        self.token, self.place, self.rest, self.fixed = gpt.token, gpt.place, gpt, fixed
        gpt.token, gpt.place = nn.Identity(), nn.Identity()

    def forward(self, codes: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.fixed and torch.is_grad_enabled()):
            x = self.token(codes) + self.place.weight[: codes.shape[1]]
        return self.rest.head(self.rest.norm(self.rest.blocks(x)))


@unhealthy("disconnected", "net.token", "net.place")
def embeddings_under_no_grad(fixed: bool) -> Fit:
    """A torch.no_grad() around the embeddings, meant for evaluation: they stay random."""
    net = NoGradEmbedding(GPT(), fixed)
    nn.init.normal_(net.token.weight, std=0.02)
    return reads_text(net, adam(5e-3), steps=250)


class ForgottenBlock(nn.Module):
    """A linear map with a residual block in its middle, which forward may forget."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 8), nn.Linear(8, 1)
        self.wide, self.narrow = nn.Linear(8, 64), nn.Linear(64, 8)
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.fixed:
            x = x + self.narrow(torch.relu(self.wide(x)))
        return self.head(x)


@unhealthy("disconnected", "net.wide", "net.narrow")
def block_never_called(fixed: bool) -> Fit:
    """Forward forgets a block that the constructor made: its capacity is paid for and not used."""
    net, points = ForgottenBlock(fixed), torch.randn(512, 16)
    return Fit(Learner(net, regress, adam(1e-2)), waves(150, 64), misfit(net, (points, wave(points))))


class TwoTasks(nn.Module):
    """Digits, and whether they are even: both heads on one trunk, logits side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.parity = mlp(2, outputs=64), nn.Linear(64, CLASSES), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.head(x := torch.relu(self.trunk(x))), self.parity(x)], dim=-1)


@unhealthy("disconnected", "net.parity")
def second_task_weighs_nothing(fixed: bool) -> Fit:
    """The weight of the second task is 0 (an integer division): its head gets gradients of exactly zero."""
    weight = 1 / 2 if fixed else 1 // 2
    learn, held = flat_digits()

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        both = net(batch[0])
        loss = F.cross_entropy(both[:, :10], batch[1]) + weight * F.cross_entropy(both[:, 10:], batch[1] % 2)
        return loss, accuracy(both[:, :10], batch[1])

    net = TwoTasks()
    fit = Learner(net, objective)
    parity = nn.Sequential(net)
    parity.append(_Slice())
    return Fit(fit, draw(learn, 150, 32), mistakes(parity, (held[0], held[1] % 2)))


class _Slice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 10:]


@unhealthy("disconnected", *BEFORE)
def quantised_without_bypass(fixed: bool) -> Fit:
    """torch.round on the features without a straight-through estimator: its gradient is zero everywhere."""

    def quantise(x: Tensor) -> Tensor:
        hard = torch.round(4 * x) / 4
        return x + (hard - x).detach() if fixed else hard

    return reads_digits(TwoStage(quantise, width=8), adam(1e-2))


def only(*names: str, lr: float = 1e-3) -> Optimizers:
    """Adam over the parameters whose names start so."""
    return lambda module: torch.optim.Adam(
        [p for name, p in module.named_parameters() if name.startswith(names)], lr=lr
    )


@unhealthy("frozen", *layers(1, 4), quick=True)
def optimizer_has_the_head_only(fixed: bool) -> Fit:
    """configure_optimizers passes on the head only: the trunk is trainable, gets gradients, and never moves."""
    net = mlp(4, 16, act=nn.Tanh)
    return reads_digits(net, only("net" if fixed else "net.head", lr=5e-3))


class NewHead(L.Callback):
    """Gives the net a fresh head when training starts, after the optimizer was made."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.net.head = nn.Linear(64, CLASSES)


@unhealthy("frozen", "net.head")
def head_replaced_after_the_optimizer(fixed: bool) -> Fit:
    """A new head is put in when training starts: the optimizer still holds the old one."""
    fit = reads_digits(mlp(3), adam(1e-3))
    if not fixed:
        fit.module.configure_callbacks = lambda: [NewHead()]  # type: ignore[method-assign]
    return fit


@unhealthy("frozen", *layers(1, 2))
def group_with_rate_zero(fixed: bool) -> Fit:
    """The first layers' parameter group has lr=0.0 (1e-3 was rounded in a configuration file)."""

    def optimizers(module: nn.Module) -> Any:
        early = [p for name, p in module.named_parameters() if ".fc1." in name or ".fc2." in name]
        late = [p for name, p in module.named_parameters() if not (".fc1." in name or ".fc2." in name)]
        return torch.optim.Adam([{"params": early, "lr": 5e-3 if fixed else 0.0}, {"params": late}], lr=5e-3)

    return reads_digits(mlp(3, 12, act=nn.Tanh), optimizers)


@unhealthy("frozen", *(f"net.fc{n}" for n in (1, 10, 11, 12)))
def pattern_freezes_too_much(fixed: bool) -> Fit:
    """Freezing "fc1" by a name that begins so freezes fc10 to fc12 too, in the middle of layers that train."""
    stages = [(f"fc{n}", Residual(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU()))) for n in range(2, 15)]
    net = nn.Sequential()
    net.add_module("fc1", nn.Linear(PIXELS, 16))
    for name, stage in stages:
        net.add_module(name, stage)
    net.add_module("head", nn.Linear(16, CLASSES))
    if not fixed:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(not name.startswith("fc1"))
    return reads_digits(net, adam(3e-3))


@unhealthy("frozen", *layers(1, 3), "net.head")
def optimizer_of_a_copy(fixed: bool) -> Fit:
    """The optimizer was made from a deep copy of the model (an average, a backup): the model itself never moves."""
    return reads_digits(mlp(3), lambda m: torch.optim.Adam((m if fixed else deepcopy(m)).parameters(), lr=1e-3))


MATRICES = (
    "net.token",
    "net.place",
    "net.head",
    *(f"net.blocks.{block}.{layer}" for block in (0, 1) for layer in ("up", "down")),
    *(f"net.blocks.{block}.attention.{layer}" for block in (0, 1) for layer in ("query", "key", "value", "out")),
)


@unhealthy("frozen", *MATRICES)
def group_with_decay_is_lost(fixed: bool) -> Fit:
    """Of two parameter groups only the one without weight decay is passed on: no matrix ever moves."""

    def optimizers(module: nn.Module) -> Any:
        return torch.optim.Adam([p for p in module.parameters() if fixed or p.ndim == 1], lr=5e-3)

    return reads_text(GPT(), optimizers)
