"""Models whose steps are made of different things: many layers, many bytes, much arithmetic, tiny gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEARNING_RATE = 1e-5
"""So small that a thousand steps later every gradient is still healthy: alerts are not what is timed here."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and one fixed batch: what it learns is beside the point, what a step costs is not."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of logits [..., classes] against targets [...]."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def normed(layers: int, width: int) -> nn.Module:
    """`layers` x Linear(width), the last with ten outputs, with LayerNorm and ReLU between them."""
    hidden = [stage for _ in range(layers - 1) for stage in (nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def plain(layers: int, width: int) -> nn.Module:
    """`layers` x Linear(width) as torch initialises them: the gradients of the first lie below float32's squares."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class ResidualNet(nn.Module):
    """`layers` x Linear(width), each around a skip, and a head: two tensors a layer."""

    def __init__(self, layers: int = 1000, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.03 * torch.tanh(layer(x))
        return self.head(x)


def wide() -> nn.Module:
    """100M parameters in four tensors and their biases."""
    return nn.Sequential(*(nn.Linear(5000, 5000) for _ in range(4)))


class Residual(nn.Module):
    """Two convolutions and an addition, in place wherever ResNets are."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        before = channels // stride
        self.body = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        out = self.body(images)
        out += self.skip(images)
        return F.relu_(out)


def cnn() -> nn.Module:
    """A ResNet of 0.7M parameters for 32 x 32 images."""
    stem = (nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
    body = (Residual(channels, stride) for channels, stride in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1)))
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Block(nn.Module):
    """Causal attention and a feed-forward, each after a norm and around a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Six blocks of width 368: 10M parameters."""

    def __init__(
        self, *, width: int = 368, depth: int = 6, heads: int = 8, vocabulary: int = 512, span: int = 64
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(span, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp", lambda: normed(50, 256), lambda: (torch.randn(64, 256), torch.randint(10, (64,)))),
        Workload("cnn", cnn, lambda: (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))),
        Workload("gpt", GPT, lambda: (torch.randint(512, (4, 64)), torch.randint(512, (4, 64)))),
        Workload("residual", ResidualNet, lambda: (torch.randn(16, 32), torch.randint(10, (16,)))),
        Workload("vanishing", lambda: plain(1000, 32), lambda: (torch.randn(16, 32), torch.randint(32, (16,)))),
        Workload("wide", wide, lambda: (torch.randn(4, 5000), torch.randint(5000, (4,)))),
    )
}
