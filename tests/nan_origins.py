"""Twenty trainings with a planted origin of NaN or infinity, each with a healthy version: what is to blame is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning as L
from gradwatch import GradWatch
from training import quiet_trainer

AT, BATCHES, SIZE = 7, 10, 8
"""The batch from which the fault is there, how many there are, and examples in each. At batch 7 nothing is sampled."""

Step = Callable[[nn.Module, Tensor, Tensor, bool], Tensor]
"""(net, inputs [8, 6], classes [8], whether the fault is there now) -> loss, 0-d."""


@dataclass(frozen=True)
class Planted:
    """A training with a planted origin."""

    net: Callable[[], nn.Module]
    step: Step
    site: str
    """What the alert has to name first; "total" for the loss."""
    words: tuple[str, ...]
    """What it has to say besides."""
    data: Callable[[Tensor], None] | None = None
    """Spoils the inputs [80, 6]."""
    fp16: bool = False
    accumulate: int = 1
    """Micro-batches in a step; of several, the second is the bad one."""
    before: Callable[[nn.Module], None] | None = None
    """Spoils the net before that batch."""


class Learner(L.LightningModule):
    def __init__(self, planted: Planted, *, faulty: bool) -> None:
        super().__init__()
        self.net = planted.net()
        self.planted, self.faulty = planted, faulty

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, classes = batch
        several = self.planted.accumulate
        late = index == several * AT + 1 if several > 1 else self.planted.fp16 or index >= AT
        return self.planted.step(self.net, inputs, classes, self.faulty and late)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.faulty and index == AT and self.planted.before:
            self.planted.before(self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train_planted(planted: Planted, *, faulty: bool, seed: int = 0) -> GradWatch:
    """Train, and return the watch."""
    torch.manual_seed(seed)
    batches = 60 if planted.fp16 else BATCHES * planted.accumulate
    inputs, classes = torch.randn(batches * SIZE, 6), torch.randint(0, 3, (batches * SIZE,))
    if faulty and planted.data:
        planted.data(inputs)
    half = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=1))] if planted.fp16 else []
    watch = GradWatch(sinks=[], budget=None)
    trainer = quiet_trainer(watch, plugins=half, accumulate_grad_batches=planted.accumulate)
    trainer.fit(Learner(planted, faulty=faulty), DataLoader(TensorDataset(inputs, classes), batch_size=SIZE))
    return watch


# ---- nets


class Between(nn.Module):
    """Where a fault is planted: a module without parameters of its own."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(x) if self.on else x


class MLP(nn.Module):
    def __init__(self, fault: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.stem, self.gate, self.body = nn.Linear(6, 16), Between(fault), nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.gate(torch.tanh(self.stem(x))))))


class CNN(nn.Module):
    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.gate, self.conv2, self.head = Between(fault), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x[:, None])), inplace=True)
        return self.head(self.conv2(self.gate(x)).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.lost = False

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        hidden = torch.ones(6, 6).triu(1).bool()
        if self.lost:
            hidden = hidden | (torch.arange(6) == 2)[:, None]
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ self.v(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.attention, self.norm = nn.Linear(1, 8), Attention(), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x[..., None])
        return self.head(self.norm(x + self.attention(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lstm, self.gate, self.head = nn.LSTM(1, 8, batch_first=True), Between(fault), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gate(self.lstm(x[..., None])[0][:, -1]))


class Game(nn.Module):
    """Two nets with a loss each, as in a GAN that is trained in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.maker(x))


class Logarithmic(nn.Module):
    """A loss that is a module."""

    def forward(self, logits: Tensor, classes: Tensor, on: bool) -> Tensor:
        shares = torch.softmax(logits * 1000 if on else logits, -1)
        return -torch.log(shares[torch.arange(len(classes)), classes]).mean()


class WithLoss(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.loss = Logarithmic()


class Own(torch.autograd.Function):
    """The logarithm of a number, written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] / (x - x)


# ---- steps


def plain(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    for module in net.modules():
        if isinstance(module, Between):
            module.on = now
    return F.cross_entropy(net(inputs), classes)


def masks(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    net.attention.lost = now
    return F.cross_entropy(net(inputs), classes)


def own_loss(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    return net.loss(net(inputs), classes, now)


def game(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    made = net.maker(inputs)
    fooled = torch.sigmoid(net.judge(made) * (1e4 if now else 1))
    seen = torch.sigmoid(net.judge(inputs))
    return -torch.log(1 - seen).mean() - torch.log(1 - fooled).mean() + (made - inputs).square().mean()


def distance(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    features = net.body(torch.tanh(net.stem(inputs)))
    gaps = (features[:, None] - features).square().sum(-1)
    extra = torch.sqrt(gaps).mean() if now else gaps.mean()
    return F.cross_entropy(net.head(features), classes) + 0.1 * extra


def nothing_left(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    logits = net(inputs)
    some = classes > (5 if now else 0)
    return F.cross_entropy(logits, classes) + logits[some].square().mean()


def weighed(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    weights = torch.zeros(len(classes)) if now else torch.ones(len(classes))
    return (F.cross_entropy(net(inputs), classes, reduction="none") * weights).sum() / weights.sum()


def hidden(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    logits = net(inputs)
    ratio = logits / (F.relu(logits) if now else 1 + F.relu(logits))
    return F.cross_entropy(torch.where(logits > 0, ratio, logits), classes)


def by_hand(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    logits = net(inputs)
    return F.cross_entropy(Own.apply(logits) if now else logits, classes)


def parameter(net: Any) -> None:
    with torch.no_grad():
        net.body.weight[1, 2] = torch.nan


def sample(inputs: Tensor) -> None:
    inputs[AT * SIZE + 3, 2] = torch.nan


def blank(inputs: Tensor) -> None:
    inputs[AT * SIZE + 5] = 0


def normed(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    # an example of zeros has no direction
    return F.cross_entropy(net(inputs / inputs.norm(dim=1, keepdim=True)), classes)


def power(net: Any, inputs: Tensor, classes: Tensor, now: bool) -> Tensor:
    features = torch.tanh(net.stem(inputs))
    gaps = (features - features.detach()) ** 2 + (0 if now else 1)
    return F.cross_entropy(net.head(net.body(features)), classes) + 0.01 * gaps.pow(0.3).mean()


ORIGINS = {
    # forward, at an activation
    "log of 0": Planted(lambda: MLP(lambda x: torch.log(torch.relu(x))), plain, "net.gate", ("logarithm of",)),
    "exp overflows": Planted(
        lambda: MLP(lambda x: torch.exp(1000 * x) / torch.exp(1000 * x).sum(-1, keepdim=True)),
        plain,
        "net.gate",
        ("torch.exp", "exponential of"),
    ),
    "0 over 0": Planted(lambda: CNN(lambda x: x / F.relu(x - 100)), plain, "net.gate", ("0 was divided by 0",)),
    "in place": Planted(lambda: MLP(lambda x: x.clone().sub_(2).sqrt_()), plain, "net.gate", ("negative number",)),
    "acos": Planted(lambda: Recurrent(lambda x: torch.acos(x * 1e3)), plain, "net.gate", ("domain",)),
    "power": Planted(lambda: CNN(lambda x: x ** (-0.5)), plain, "net.gate", ("0 was raised",)),
    "all masked": Planted(Transformer, masks, "net.attention", ("torch.softmax", "is fully masked")),
    # forward, in the loss
    "log in a loss module": Planted(WithLoss, own_loss, "net.loss", ("logarithm of 0",)),
    "log in a game": Planted(Game, game, "total", ("torch.log", "in the loss")),
    "mean of nothing": Planted(MLP, nothing_left, "total", ("averages over no value",)),
    "division by a count": Planted(MLP, weighed, "total", ("0 was divided by 0",)),
    # data and parameters
    "a bad sample": Planted(MLP, plain, "net.stem", ("NaN in it", "example 3", "batch 7"), data=sample),
    "a blank sample": Planted(MLP, normed, "total", ("0 was divided by 0", "example 5"), data=blank),
    "a bad weight": Planted(MLP, plain, "net.body", ("weights of layer net.body",), before=parameter),
    # backward
    "root of 0": Planted(MLP, distance, "net.body", ("torch.sqrt", "slope of a square root at 0")),
    "power of 0": Planted(MLP, power, "net.stem", ("slope of a power below 1",)),
    "hidden by where": Planted(MLP, hidden, "net.head", ("divided by 0", "torch.where")),
    "norm at 0 in a module": Planted(
        lambda: Recurrent(lambda x: x + (x - x.detach()).square().sum(-1, keepdim=True).sqrt()),
        plain,
        "net.gate",
        ("slope of a square root at 0",),
    ),
    "a function's own": Planted(MLP, by_hand, "net.head", ("OwnBackward",)),
    # more than one micro-batch, more than one number format
    "second of four": Planted(
        lambda: MLP(lambda x: torch.log(torch.relu(x))), plain, "net.gate", ("logarithm of", "batch 29"), accumulate=4
    ),
    "fp16 overflows": Planted(
        lambda: MLP(lambda x: x.half() * 60000 * 60000), plain, "net.gate", ("65,504",), fp16=True
    ),
    "a factor": Planted(
        lambda: MLP(lambda x: x * 1e30 * 1e30), plain, "net.gate", ("by 1e30", "a smaller factor than 1e30")
    ),
    "a divisor": Planted(
        lambda: MLP(lambda x: x / 1e-30 / 1e-30), plain, "net.gate", ("by 1e-30", "a larger divisor than 1e-30")
    ),
}
