"""Small networks that several cases are made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Fit
from benchmarks.zoo.learner import Learner, Objective, Optimizers, classify, mistakes, surprise
from benchmarks.zoo.material import BYTES, CLASSES, PIXELS, digits, draw, flat_digits, snippets

Activation = Callable[[], nn.Module]


def mlp(
    depth: int = 3,
    width: int = 64,
    *,
    act: Activation = nn.ReLU,
    norm: Callable[[int], nn.Module] | None = None,
    inputs: int = PIXELS,
    outputs: int = CLASSES,
) -> nn.Sequential:
    """`depth` hidden layers fc1 .. fcN, each with `norm` and `act`, and a head: [N, inputs] -> [N, outputs]."""
    stages: list[tuple[str, nn.Module]] = []
    for number in range(1, depth + 1):
        stages.append((f"fc{number}", nn.Linear(inputs if number == 1 else width, width)))
        if norm:
            stages.append((f"norm{number}", norm(width)))
        stages.append((f"act{number}", act()))
    return nn.Sequential(OrderedDict([*stages, ("head", nn.Linear(width, outputs))]))


def layers(first: int, last: int, *, prefix: str = "net.fc") -> tuple[str, ...]:
    """Names of `mlp`'s hidden layers from `first` to `last`."""
    return tuple(f"{prefix}{number}" for number in range(first, last + 1))


def start(net: nn.Module, fill: Callable[[Tensor], Any]) -> nn.Module:
    """`net` with `fill` applied to every weight matrix or kernel, and zero biases for them."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fill(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return net


def he(weight: Tensor) -> Tensor:
    return nn.init.kaiming_normal_(weight, nonlinearity="relu")


def normal(std: float) -> Callable[[Tensor], Tensor]:
    return lambda weight: nn.init.normal_(weight, std=std)


def cnn(
    widths: Sequence[int] = (8, 16),
    *,
    act: Activation = nn.ReLU,
    norm: Callable[[int], nn.Module] | None = nn.BatchNorm2d,
) -> nn.Sequential:
    """Convolutions conv1 .. convN and a head: [N, 1, 8, 8] -> [N, 10]; every second one halves the image."""
    stages: list[tuple[str, nn.Module]] = []
    before = 1
    for number, width in enumerate(widths, 1):
        stride = 2 if number in (2, 4) else 1
        stages.append((f"conv{number}", nn.Conv2d(before, width, 3, stride, 1)))
        if norm:
            stages.append((f"norm{number}", norm(width)))
        stages.append((f"act{number}", act()))
        before = width
    stages += [("pool", nn.AdaptiveAvgPool2d(1)), ("flat", nn.Flatten()), ("head", nn.Linear(before, CLASSES))]
    return nn.Sequential(OrderedDict(stages))


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, body: nn.Module, *, keep: float = 1.0, skip: float = 1.0) -> None:
        """`keep`: probability that the body runs in training (stochastic depth). `skip`: the factor of x."""
        super().__init__()
        self.body, self.keep, self.skip = body, keep, skip

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.keep < 1 and float(torch.rand(())) > self.keep:
            return self.skip * x
        return self.skip * x + self.body(x)


class Attention(nn.Module):
    """Causal self-attention, [N, span, width]; `scale` None divides by the root of the head's width."""

    def __init__(self, width: int, heads: int, *, scale: float | None = None, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.scale, self.causal = heads, scale, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block, norms first."""

    def __init__(self, width: int, heads: int = 2, *, scale: float | None = None, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, scale=scale, causal=causal)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Codes [N, span] -> logits [N, span, 128]."""

    def __init__(self, *, width: int = 32, depth: int = 2, span: int = 24, scale: float | None = None) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(BYTES, width), nn.Embedding(span, width)
        self.blocks = nn.Sequential(*(Block(width, scale=scale) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.token(codes) + self.place.weight[: codes.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Last(nn.Module):
    """A recurrent net `rnn` over [N, span, inputs] and a head on its last output -> [N, outputs]."""

    def __init__(self, rnn: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(width, outputs)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.head(self.rnn(sequence)[0][:, -1])


class Times(nn.Module):
    """x times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Call(nn.Module):
    """A function as a module, without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def reads_digits(
    net: nn.Module,
    optimizers: Optimizers | None = None,
    *,
    objective: Objective = classify,
    steps: int = 150,
    size: int = 32,
    images: bool = False,
    **options: Any,
) -> Fit:
    """`net` learns to read digits; `images`: as [N, 1, 8, 8] rather than [N, 64]."""
    learn, held = digits() if images else flat_digits()
    return Fit(Learner(net, objective, optimizers), draw(learn, steps, size), mistakes(net, held), options)


def reads_text(
    net: nn.Module, optimizers: Optimizers | None = None, *, steps: int = 150, span: int = 24, **options: Any
) -> Fit:
    """`net` learns what follows in source text."""
    held = snippets(2, 32, span, held_out=True)
    return Fit(Learner(net, classify, optimizers), snippets(steps, 16, span), surprise(net, held), options)
