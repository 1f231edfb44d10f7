"""Records of small trainings, healthy and not, as sinks get them: rules can be asked of them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import torch
from torch import Tensor, nn

from gradwatch import GradWatch, Watch
from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import Record, Run
from gradwatch.core.training_loop import LoopKind
from models import module_of
from synthetic_records import block_of
from training import quiet_trainer


@dataclass
class Kept:
    """A sink that keeps the records."""

    records: list[Record] = field(default_factory=list)

    def open(self, run: Run) -> None: ...

    def record(self, record: Record) -> None:
        self.records.append(record)

    def alert(self, alert: Alert) -> None: ...

    def close(self, verdict: Verdict) -> None: ...


@dataclass(frozen=True)
class RecordedRun:
    """What a training left."""

    records: list[Record]
    alerts: tuple[Alert, ...]
    loop: LoopKind = "own"
    """In whose terms the alerts are."""
    """What the watch of that training reported."""

    def blocks(self, sizes: Callable[[], int]) -> list[Block]:
        """The records in blocks of `sizes()`, or shorter where the layout changes."""
        blocks, begin = [], 0
        while begin < len(self.records):
            end, most = begin + 1, sizes()
            while end < min(begin + most, len(self.records)) and self.records[end].layout is self.records[begin].layout:
                end += 1
            blocks.append(block_of(self.records[begin:end]))
            begin = end
        return blocks


def mlp(depth: int = 4, activation: type[nn.Module] = nn.ReLU, width: int = 16, *, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [module for _ in range(depth) for module in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def batch(step: int, width: int = 16) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :1] - 0.5 * inputs[:, 1:2]


def trained(
    net: nn.Module,
    *,
    steps: int = 130,
    lr: float = 0.05,
    edit: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
    scale: Callable[[int], float] = lambda step: 1.0,
    clear: bool = True,
) -> RecordedRun:
    """`scale`: factor of the inputs and of the loss of a step; `clear`: whether gradients are cleared between steps."""
    kept, optimizer = Kept(), torch.optim.SGD(net.parameters(), lr)
    with Watch(net, sinks=(kept,), budget=None) as watch:
        for step in range(steps):
            if edit:
                edit(net, optimizer, step)
            inputs, targets = batch(step)
            if clear:
                optimizer.zero_grad()
            found = loss(net(inputs * scale(step)), targets) * scale(step)
            found.backward()
            watch.step(optimizer, loss=found)
            optimizer.step()
    return RecordedRun(kept.records, watch.alerts)


def at(step: int, change: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Callable[..., None]:
    def edit(net: nn.Module, optimizer: torch.optim.Optimizer, now: int) -> None:
        if now == step:
            with torch.no_grad():
                change(net, optimizer)

    return edit


def jump_of_the_rate(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 30.0


def dead_units(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net[2].bias.fill_(-1e4)


def frozen_layer(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net[4].requires_grad_(False)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = mlp(1), mlp(1, width=1, seed=1), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).detach())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.RNN(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.rnn(inputs[..., None])[0][:, -1])


def tampered() -> nn.Module:
    net = mlp()
    net[2].weight.register_hook(lambda gradient: -gradient)
    return net


def two_optimizers() -> RecordedRun:
    """Two nets in one, of which the second steps after every third step of the first; the first has a spike."""
    net, kept = nn.ModuleList([mlp(2), mlp(2, seed=1)]), Kept()
    optimizers = [torch.optim.SGD(part.parameters(), 0.02) for part in net]
    with Watch(net, sinks=(kept,), budget=None) as watch:
        for step in range(160):
            place = int(step % 4 == 3)
            inputs, targets = batch(step)
            optimizers[place].zero_grad()
            found = nn.functional.mse_loss(net[place](inputs), targets) * (200.0 if step in (80, 120) else 1.0)
            found.backward()
            watch.step(optimizers[place], loss=found)
            optimizers[place].step()
    return RecordedRun(kept.records, watch.alerts)


def incomplete_windows() -> RecordedRun:
    """Four micro-batches a step, and two in the last step of an epoch; the loss of one batch is large."""
    kept, batches = Kept(), count()

    def loss(net: nn.Module, inputs: Tensor, index: int) -> Tensor:
        return (net(inputs) - inputs[:, :1]).square().mean() * (1e3 if next(batches) == 253 else 1.0)

    torch.manual_seed(0)
    data = torch.randn(4 * 10, 16)
    watch = GradWatch(sinks=(kept,), budget=None)
    trainer = quiet_trainer(watch, max_epochs=40, limit_val_batches=0, accumulate_grad_batches=4)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(module_of(mlp(), loss, lr=1e-4, validates=True), loader, loader)
    return RecordedRun(kept.records, watch.alerts, "automatic")


RUNS: dict[str, Callable[[], RecordedRun]] = {
    "healthy": lambda: trained(mlp()),
    "spikes": lambda: trained(mlp(), lr=1e-4, scale=lambda step: 20.0 if step in (60, 75, 92) else 1.0),
    "divergence": lambda: trained(mlp(), edit=at(50, jump_of_the_rate)),
    "dead": lambda: trained(mlp(), edit=at(30, dead_units)),
    "vanishing": lambda: trained(mlp(12, nn.Sigmoid)),
    "exploding": lambda: trained(mlp(8, nn.Identity).apply(larger), lr=1e-12),
    "nonfinite": lambda: trained(mlp(), scale=lambda step: float("nan") if 60 <= step < 64 else 1.0),
    "frozen": lambda: trained(mlp(6), edit=at(0, frozen_layer)),
    "detached": lambda: trained(Detached()),
    "stalled": lambda: trained(mlp(), lr=1e-12),
    "collapse": lambda: trained(mlp(), edit=lambda net, optimizer, step: net.apply(shrunk)),
    "unscaled inputs": lambda: trained(mlp(), lr=1e-9, scale=lambda step: 1e5),
    "sigmoid before its loss": lambda: trained(
        nn.Sequential(mlp(1), nn.Sigmoid()), loss=lambda out, y: nn.functional.binary_cross_entropy_with_logits(out, y)
    ),
    "saturated": lambda: trained(mlp(3, nn.Tanh), scale=lambda step: 100.0, lr=1e-9),
    "tampered": lambda: trained(tampered()),
    "stale gradients": lambda: trained(mlp(), clear=False, lr=1e-5),
    "recurrent": lambda: trained(Recurrent(), lr=1e-6, steps=160),
    "two optimizers": two_optimizers,
    "incomplete windows": incomplete_windows,
}


def larger(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.mul_(30)


def shrunk(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.mul_(0.95)


@cache
def recorded(name: str) -> RecordedRun:
    return RUNS[name]()
