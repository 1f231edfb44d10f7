"""Trainings of a plain loop that the checks share, and the reference that the numbers are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.check import hold
from gradwatch import Watch

LossOf = Callable[[nn.Module, int], Tensor]


class Net(nn.Module):
    """Four linear layers with norms, ReLU and dropout."""

    def __init__(self, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        stages = [
            stage
            for _ in range(3)
            for stage in (nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(dropout))
        ]
        self.body = nn.Sequential(*stages)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Split(nn.Module):
    """Two linear layers on two devices."""

    def __init__(self, first: torch.device | str, last: torch.device | str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64).to(first), nn.Linear(64, 10).to(last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)).to(self.last.weight.device))


def net(device: torch.device, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(device)


def batch_of(step: int, device: torch.device, *, size: int = 32, width: int = 64) -> tuple[Tensor, Tensor]:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(size, width, generator=generator), torch.randint(10, (size,), generator=generator)
    return x.to(device), y.to(device)


def usual_loss(model: nn.Module, step: int) -> Tensor:
    x, y = batch_of(step, next(model.parameters()).device)
    return F.cross_entropy(model(x).float(), y)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int | range,
    *,
    watch: Watch | None = None,
    loss_of: LossOf = usual_loss,
    scaler: Any = None,
    before: Callable[[int], object] = lambda step: None,
    backward_done: Callable[[int], object] = lambda step: None,
    measured: Callable[[int], object] = lambda step: None,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Train; `before` runs before each step, `backward_done` before it is measured, `measured` before it is taken.

    `stream`: where the steps run, if not in the one in which the watch is entered.
    """
    with watch or nullcontext(), torch.cuda.stream(stream) if stream else nullcontext():
        for step in range(steps) if isinstance(steps, int) else steps:
            before(step)
            optimizer.zero_grad()
            loss = loss_of(model, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            backward_done(step)
            if watch is not None:
                watch.step(optimizer, loss=loss.detach())
            measured(step)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()


def bits(model: nn.Module) -> Iterator[bytes]:
    """Of all weights and buffers."""
    for tensor in model.state_dict().values():
        yield tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same_bits(one: nn.Module, other: nn.Module) -> None:
    hold(list(bits(one)) == list(bits(other)), "the weights differ")


def norm_of(tensor: Tensor) -> float:
    """2-norm on the CPU in float64."""
    tensor = tensor.detach()
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return float(torch.linalg.vector_norm(dense.cpu().double()))


def gradient_norms(model: nn.Module, scale: float = 1.0) -> dict[str, float]:
    return {name: norm_of(p.grad) / scale for name, p in model.named_parameters() if p.grad is not None}


def same_norms(watch: Watch, truths: Mapping[int, Mapping[str, float]], *, rel: float = 1e-4) -> float:
    """Hold `grad_norm` of every parameter against the reference, by place in the history; the largest difference."""
    worst = 0.0
    for place, truth in truths.items():
        for name, expected in truth.items():
            found = float(watch.history.series("grad_norm", name)[place])
            off = abs(found - expected) / expected if expected else abs(found)
            worst = max(worst, off)
            hold(off <= rel, f"step {place}, {name}: {found:g} where {expected:g} is right")
    return worst


def no_trouble(watch: Watch) -> None:
    hold(not watch.verdict.notes, "; ".join(watch.verdict.notes))
