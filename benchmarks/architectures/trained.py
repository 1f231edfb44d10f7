"""What is trained: a network of somebody's library on digits, source text, graphs or series, small and for seconds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning as L
from benchmarks.zoo.case import Fit
from benchmarks.zoo.material import BYTES, CLASSES, digits, draw, snippets

Objective = Callable[[Any, Any], Tensor]
"""(network, batch) -> loss."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A network by name, the package that has it, and its training."""

    name: str
    package: str
    make: Callable[[], Fit]

    def build(self, seed: int) -> Fit:
        L.seed_everything(seed, verbose=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make()


class Trained(L.LightningModule):
    """Any network, an objective and AdamW."""

    def __init__(self, net: nn.Module, objective: Objective, rate: float) -> None:
        super().__init__()
        self.net, self.objective, self.rate = net, objective, rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.objective(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def fit(net: nn.Module, batches: Sequence[Any], objective: Objective, *, rate: float = 1e-3, **options: Any) -> Fit:
    """The yardstick is the loss over the last eight batches, which are not trained on, with the network in training
    mode as it was: norms of a few dozen steps are not yet worth evaluating by.
    """
    held = batches[-8:]

    def measure() -> float:
        with torch.no_grad():
            return float(torch.stack([objective(net, batch) for batch in held]).mean())

    return Fit(Trained(net, objective, rate), batches[:-8], measure, options)


def reads_images(
    net: nn.Module, *, steps: int = 60, size: int = 32, batch: int = 16, rate: float = 1e-3, channels: int = 3
) -> Fit:
    """`net` classifies digits, enlarged to `size` and repeated over the channels."""
    pairs = draw(digits()[0], steps + 8, batch)
    batches = [(F.interpolate(x, size=(size, size)).expand(-1, channels, -1, -1).contiguous(), y) for x, y in pairs]
    return fit(net, batches, _classes, rate=rate)


def _classes(net: Any, batch: Any) -> Tensor:
    out = net(batch[0])
    out = getattr(out, "logits", out)
    return F.cross_entropy(out["out"].mean((2, 3)) if isinstance(out, dict) else out, batch[1])


def writes_text(net: nn.Module, *, steps: int = 120, span: int = 24, rate: float = 1e-3) -> Fit:
    """A causal language model of transformers on source text."""
    batches = [torch.cat([x, y[:, -1:]], 1) for x, y in snippets(steps + 8, 16, span)]
    return fit(net, batches, lambda net, ids: net(input_ids=ids, labels=ids).loss, rate=rate, gradient_clip_val=1.0)


def completes_text(net: nn.Module, *, steps: int = 120, span: int = 16, rate: float = 1e-3) -> Fit:
    """An encoder-decoder of transformers that copies source text."""
    batches = [x.contiguous() for x, _ in snippets(steps + 8, 16, span)]
    return fit(net, batches, lambda net, ids: net(input_ids=ids, labels=ids).loss, rate=rate, gradient_clip_val=1.0)


def fills_text(net: nn.Module, *, steps: int = 120, span: int = 24, rate: float = 1e-3) -> Fit:
    """A masked language model of transformers: a fifth of the codes is masked by 0."""
    batches = []
    for codes, _ in snippets(steps + 8, 16, span):
        hidden = torch.rand(codes.shape) < 0.2
        batches.append((codes.masked_fill(hidden, 0), codes.masked_fill(~hidden, -100)))
    return fit(net, batches, lambda net, b: net(input_ids=b[0], labels=b[1]).loss, rate=rate, gradient_clip_val=1.0)


def sorts_text(net: nn.Module, *, steps: int = 120, span: int = 24, rate: float = 1e-3) -> Fit:
    """A sequence classifier of transformers: does the snippet begin a line?"""
    batches = [(x, (x[:, 1:] == 10).any(1).long()) for x, _ in snippets(steps + 8, 16, span)]
    return fit(net, batches, lambda net, b: net(input_ids=b[0], labels=b[1]).loss, rate=rate, gradient_clip_val=1.0)


def series(steps: int, batch: int, span: int, channels: int = 1) -> Tensor:
    """Sums of two sines with random phases and a little noise, [steps, batch, span, channels]."""
    time = torch.arange(span, dtype=torch.float32)[:, None]
    phase, pace = 6.28 * torch.rand(2, steps, batch, 1, channels), 0.2 + 0.3 * torch.rand(2, steps, batch, 1, channels)
    return (pace * time + phase).sin().sum(0) + 0.05 * torch.randn(steps, batch, span, channels)


Graph = tuple[Tensor, Tensor, Tensor]
"""Nodes [n, features], edges [2, m], a label for each node [n]."""


def graphs(steps: int, *, nodes: int = 60, classes: int = 4) -> list[Graph]:
    """Graphs in which neighbours are mostly of one class, and features tell the class weakly."""
    centres = torch.randn(classes, 16)
    found: list[Graph] = []
    for _ in range(steps):
        labels = torch.randint(classes, (nodes,))
        alike = labels[:, None] == labels
        near = torch.rand(nodes, nodes) < torch.where(alike, 0.25, 0.02)
        near = (near | near.T).fill_diagonal_(False)
        found.append((centres[labels] + 1.5 * torch.randn(nodes, 16), near.nonzero().T.contiguous(), labels))
    return found


def labels_nodes(net: nn.Module, *, steps: int = 120, rate: float = 5e-3) -> Fit:
    """A graph network labels nodes."""
    return fit(net, graphs(steps + 8), lambda net, g: F.cross_entropy(net(g[0], g[1]), g[2]), rate=rate)


__all__ = ["BYTES", "CLASSES"]
