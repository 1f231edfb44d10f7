"""Healthy trainings on rewards, pairs and teachers: the loss may be zero, negative or noise, and the model learns."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning as L
from benchmarks.zoo.case import Fit, healthy
from benchmarks.zoo.learner import Learner, accuracy, adam, mistakes
from benchmarks.zoo.material import CLASSES, PIXELS, Pair, draw, flat_digits
from benchmarks.zoo.parts import mlp, reads_digits


@healthy()
def rewarded_guesses() -> Fit:
    """REINFORCE: digits are guessed, and a right guess is rewarded; the loss is noise around zero."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        guesses = torch.distributions.Categorical(logits=logits)
        guess = guesses.sample()
        reward = (guess == batch[1]).float()
        return -(guesses.log_prob(guess) * (reward - reward.mean())).mean(), accuracy(logits, batch[1])

    return reads_digits(mlp(2), adam(5e-3), objective=objective, steps=300, size=64)


class QLearner(L.LightningModule):
    """Deep Q-learning with two moves, and a target network that follows after `refresh` batches (Mnih et al. 2015)."""

    def __init__(
        self,
        net: nn.Module,
        follow: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float, Tensor]],
        *,
        discount: float,
        refresh: int,
        lr: float,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """`follow`: (states, moves) -> the states after them, their rewards, and which of them are the last."""
        super().__init__()
        self.net, self.target = net, deepcopy(net).requires_grad_(False)
        self.follow, self.discount, self.refresh, self.lr, self.loss = follow, discount, refresh, lr, loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx % self.refresh == 0:
            self.target.load_state_dict(self.net.state_dict())
        state, move = batch
        after, reward, done = self.follow(state, move)
        worth = self.target(after).max(-1).values
        wanted = reward + self.discount * worth.masked_fill(done, 0.0)
        return self.loss(self.net(state).gather(1, move[:, None]).squeeze(1), wanted)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=self.lr)


def _walk(place: Tensor, move: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A corridor of twelve places: its right end is worth 1."""
    after = (place.argmax(-1) + 2 * move - 1).clamp(0, 11)
    return F.one_hot(after, 12).float(), (after == 11).float(), after == 11


@healthy()
def values_with_target_network() -> Fit:
    """Deep Q-learning: the targets move, and the loss grows while the model learns."""
    net = mlp(1, 32, inputs=12, outputs=2)
    module = QLearner(net, _walk, discount=0.9, refresh=20, lr=5e-3, loss=F.smooth_l1_loss)
    truth = 0.9 ** torch.arange(10, -1, -1.0)

    def measure() -> float:
        with torch.no_grad():
            guess = module.net(torch.eye(12)[:11])[:, 1]
        return float((guess - truth).square().mean() / truth.var())

    played = [(torch.randint(11, (64,)), torch.randint(2, (64,))) for _ in range(300)]
    return Fit(module, [(F.one_hot(place, 12).float(), move) for place, move in played], measure)


def _balance(state: Tensor, right: Tensor) -> tuple[Tensor, float, Tensor]:
    """A cart with a pole, 0.02 s later: position, speed, angle and its rate, pushed with 10 N (Barto, Sutton and
    Anderson 1983; equations of Florian 2007). Each step is worth 1; the last is that at which it falls or leaves.
    """
    _, speed, angle, rate = state.T
    pull = (20.0 * right - 10.0 + 0.05 * rate**2 * angle.sin()) / 1.1
    spin = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    after = state + 0.02 * torch.stack([speed, pull - 0.05 * spin * angle.cos() / 1.1, rate, spin], 1)
    return after, 1.0, (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21)


@healthy()
def values_that_grow() -> Fit:
    """Deep Q-learning without an end in sight: values, head and loss grow tenfold, as the pole stands ever longer."""
    net = mlp(1, 128, inputs=4, outputs=2)
    module = QLearner(net, _balance, discount=0.99, refresh=5, lr=1e-2, loss=F.mse_loss)
    start = (torch.rand(128, 4) - 0.5) / 10
    states, state = [], start
    for _ in range(40):
        states.append(state)
        after, _, fallen = _balance(state, torch.randint(2, (128,)))
        state = torch.where(fallen[:, None], start, after)

    def measure() -> float:
        """How far from 100, what 0.99 adds up to, it thinks a pole that stands upright is worth, relative to that."""
        with torch.no_grad():
            return float((module.net(start).max(-1).values / 100 - 1).abs().mean())

    played = torch.cat(states)
    return Fit(
        module, [(played[torch.randint(len(played), (64,))], torch.randint(2, (64,))) for _ in range(400)], measure
    )


@healthy()
def contrasts_between_views() -> Fit:
    """InfoNCE between two noisy views at a temperature of 0.1: a loss in which every example is a class."""
    net = mlp(2, outputs=16)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        views = [F.normalize(net(batch[0] + 0.2 * torch.randn_like(batch[0])), dim=-1) for _ in range(2)]
        logits = views[0] @ views[1].T / 0.1
        return F.cross_entropy(logits, torch.arange(len(logits))), None

    batches = draw(flat_digits()[0], 150, 64)
    held = flat_digits()[1][0][:64]

    def measure() -> float:
        with torch.no_grad():
            return float(objective(net, (held, held))[0])

    return Fit(Learner(net, objective, adam(2e-3)), batches, measure)


@healthy()
def triplets_with_margin() -> Fit:
    """A triplet loss: soon most keep their distance, and whole batches have a gradient of zero."""
    net = mlp(2, outputs=8)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        inputs, labels = batch
        order = labels.argsort()
        anchor, other = net(inputs[order]), labels[order]
        near, far = anchor.roll(1, 0), anchor.roll(len(anchor) // 2, 0)
        fits = (other == other.roll(1, 0)) & (other != other.roll(len(anchor) // 2, 0))
        losses = F.triplet_margin_loss(anchor, near, far, margin=0.3, reduction="none")
        return (losses * fits).sum() / fits.sum().clamp(min=1), None

    learn, held = flat_digits()

    def measure() -> float:
        with torch.no_grad():
            z, labels = net(held[0]), held[1]
        same = labels[:, None] == labels
        distances = torch.cdist(z, z)
        return float(distances[same].mean() / distances[~same].mean())

    return Fit(Learner(net, objective, adam(2e-3)), draw(learn, 250, 64), measure)


class Reverse(torch.autograd.Function):
    """The identity whose gradient changes its sign (Ganin and Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class Adapted(nn.Module):
    """Digits read from features that do not tell whether the image was inverted."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head, self.domain = mlp(2, outputs=32), nn.Linear(32, CLASSES), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.features(x)))


@healthy()
def domains_by_reversal() -> Fit:
    """A gradient reversal where it belongs: between features and a domain classifier (DANN)."""
    net = Adapted()

    def objective(net: Any, batch: Pair) -> tuple[Tensor, Tensor | None]:
        inputs, labels = batch
        inverted = torch.rand(len(inputs)) < 0.5
        seen = torch.where(inverted[:, None], 1 - inputs, inputs)
        features = torch.relu(net.features(seen))
        logits = net.head(features)
        loss = F.cross_entropy(logits, labels)
        loss = loss + F.cross_entropy(net.domain(Reverse.apply(features)), inverted.long())
        return loss, accuracy(logits, labels)

    learn, held = flat_digits()
    return Fit(Learner(net, objective, adam(3e-3)), draw(learn, 200, 32), mistakes(net, held))


class Taught(nn.Module):
    """A student and a frozen teacher beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = mlp(2, 96), mlp(2, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


@healthy()
def taught_by_a_teacher() -> Fit:
    """Distillation at a temperature of 4 from a trained teacher that is part of the module and frozen."""
    net, (learn, held) = Taught(), flat_digits()
    optimizer = torch.optim.Adam(net.teacher.parameters(), lr=3e-3)
    for x, y in draw(learn, 120, 32):
        optimizer.zero_grad()
        F.cross_entropy(net.teacher(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    net.teacher.requires_grad_(False)

    def objective(net: Any, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        wanted = (net.teacher(batch[0]) / 4).softmax(-1)
        loss = 16 * F.kl_div((logits / 4).log_softmax(-1), wanted, reduction="batchmean")
        return loss, accuracy(logits, batch[1])

    def optimizers(module: Any) -> Any:
        return torch.optim.Adam(module.net.student.parameters(), lr=3e-3)

    return Fit(Learner(net, objective, optimizers), draw(learn, 150, 32), mistakes(net, held))


@healthy()
def auxiliary_heads() -> Fit:
    """A head at every depth, the losses weighted 0.01 to 1: the early heads' gradients are small on purpose."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(PIXELS, 64) if n == 0 else nn.Linear(64, 64) for n in range(3))
            self.heads = nn.ModuleList(nn.Linear(64, CLASSES) for _ in range(3))

        def all(self, x: Tensor) -> list[Tensor]:
            found = []
            for layer, head in zip(self.layers, self.heads, strict=True):
                x = torch.relu(layer(x))
                found.append(head(x))
            return found

        def forward(self, x: Tensor) -> Tensor:
            return self.all(x)[-1]

    def objective(net: Any, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net.all(batch[0])
        losses = [w * F.cross_entropy(each, batch[1]) for w, each in zip((0.01, 0.1, 1.0), logits, strict=True)]
        return torch.stack(losses).sum(), accuracy(logits[-1], batch[1])

    return reads_digits(Net(), adam(2e-3), objective=objective)
