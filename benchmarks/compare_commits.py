"""Whether two commits watch alike: twelve trainings are run with each, and weights, records and alerts are compared.

    python benchmarks/compare_commits.py OLD [NEW]

NEW is HEAD unless it is given. Prints a line a training and what differs; exits with 1 if anything does. Each commit
runs in a process and a checkout of its own, and `budget=None` samples by step count: both sample the same steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomllib

STEPS = 60


def digest(numbers: Any) -> str:
    numbers[numbers != numbers] = float("nan")  # there are many NaN
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


def trainings() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Name -> a training, which returns the trained module and its watch."""
    import torch
    from torch import Tensor, nn

    import lightning as L
    from gradwatch import Clip, GradWatch, SkipNonFinite, Watch, tap

    class Module(L.LightningModule):
        def __init__(
            self, net: nn.Module, rate: float, *, poisoned: int = -1, optimizer: type = torch.optim.Adam
        ) -> None:
            super().__init__()
            self.net, self.rate, self.poisoned, self.optimizer = net, rate, poisoned, optimizer

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            inputs, targets = batch
            if index == self.poisoned:
                inputs = inputs * float("nan")
            return nn.functional.cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self) -> Any:
            return self.optimizer(self.parameters(), self.rate)

    class TwoOptimizers(Module):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], index: int) -> None:
            inputs, targets = batch
            for optimizer in self.optimizers():
                loss = nn.functional.cross_entropy(self.net(inputs), targets)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            parameters = list(self.parameters())
            return torch.optim.SGD(parameters[:2], 0.01), torch.optim.Adam(parameters[2:], 1e-3)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.lstm(inputs.reshape(-1, 4, 4))[0][:, -1])

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(tap(self.block(inputs[:, None].expand(-1, 5, -1)), "attended").mean(1))

    def data() -> Any:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(STEPS * 8, 16, generator=generator)
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1)), batch_size=8
        )

    def deep(width: int, depth: int, activation: type[nn.Module], *, gain: float = 1.0) -> nn.Module:
        layers = [m for _ in range(depth) for m in (nn.Linear(width, width), activation())]
        with torch.no_grad():
            for layer in layers[::2]:
                layer.weight.mul_(gain)
        return nn.Sequential(*layers, nn.Linear(width, 4))

    def cnn() -> nn.Module:
        return nn.Sequential(
            *(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(128, 4)),
        )

    def dead() -> nn.Module:
        net = deep(16, 3, nn.ReLU)
        with torch.no_grad():
            net[2].bias.fill_(-100.0)
        return net

    def fit(make: Callable[[], Any], *, options: dict[str, Any] | None = None, **trainer: Any) -> Callable[[], Any]:
        def run() -> tuple[Any, Any]:
            torch.manual_seed(0)
            module, watch = make(), GradWatch(budget=None, sinks=(), **(options or {}))
            settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            settings |= {"enable_model_summary": False, "accelerator": "cpu", "callbacks": [watch]} | trainer
            L.Trainer(**settings).fit(module, data())
            return module, watch

        return run

    def plain() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = deep(16, 4, nn.GELU)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        with Watch(net, budget=None, sinks=()) as watch:
            for inputs, targets in data():
                loss = nn.functional.cross_entropy(net(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                watch.step(optimizer, loss=loss)
                optimizer.step()
        return net, watch

    return {
        "healthy mlp": fit(lambda: Module(deep(16, 3, nn.ReLU), 1e-3)),
        "sigmoids": fit(lambda: Module(deep(16, 10, nn.Sigmoid), 1e-3)),
        "exploding": fit(lambda: Module(deep(16, 12, nn.Identity, gain=3.0), 1e-3)),
        "dead": fit(lambda: Module(dead(), 1e-3)),
        "rate too high": fit(lambda: Module(deep(16, 3, nn.ReLU), 3.0, optimizer=torch.optim.SGD)),
        "cnn, in place": fit(lambda: Module(cnn(), 1e-3)),
        "lstm, accumulated": fit(lambda: Module(Recurrent(), 1e-2), accumulate_grad_batches=4),
        "attention, bf16": fit(lambda: Module(Attention(), 1e-3), precision="bf16-mixed"),
        "two optimizers": fit(lambda: TwoOptimizers(deep(16, 2, nn.Tanh), 1e-3)),
        "NaN, replayed": fit(lambda: Module(deep(16, 3, nn.ReLU), 1e-3, poisoned=30)),
        "clipped, NaN skipped": fit(
            lambda: Module(deep(16, 3, nn.ReLU), 1e-2, poisoned=30),
            options={"interventions": [Clip(0.1), SkipNonFinite()]},
            gradient_clip_val=0.05,
        ),
        "plain loop": plain,
    }


def observed() -> Iterator[tuple[str, dict[str, Any]]]:
    """What each training left, as plain data."""
    import dataclasses

    import torch

    for name, run in trainings().items():
        module, watch = run()
        history = watch.history
        yield (
            name,
            {
                "weights": digest(torch.cat([p.detach().reshape(-1).float() for p in module.parameters()]).numpy()),
                "steps": [int(step) for step in history.steps],
                "numbers": {
                    statistic: {site: digest(history.series(statistic, site)) for site in history.sites(statistic)}
                    for statistic in sorted(history.statistics())
                },
                "alerts": [repr(dataclasses.replace(alert)) for alert in watch.alerts],
                "verdict": re.sub(r"overhead [\d.]+ %", "", str(watch.verdict)),  # the one number of a clock
            },
        )


def run_commit(commit: str, folder: Path) -> dict[str, Any]:
    """What `observed` gives with the source of `commit`."""
    checkout = folder / commit.replace("/", "_")
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(checkout), commit], check=True)
    try:
        own_entry_points(checkout)
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--observe"]
        done = subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(checkout)], check=True)


def own_entry_points(checkout: Path) -> None:
    """Have Lightning find the entry points of the checkout, in place of those of the installed version."""
    groups = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in of.items()) for group, of in groups.items()
    ]
    folder = checkout / "src" / "gradwatch.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: gradwatch\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("\n".join(lines))


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{place}/{key}")
    elif old != new:
        yield f"{place}: {old!r}  ->  {new!r}"


def main() -> int:
    if sys.argv[1:] == ["--observe"]:
        print(json.dumps(dict(observed())))
        return 0
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    commits = (*sys.argv[1:], "HEAD")[:2]
    with tempfile.TemporaryDirectory() as folder:
        old, new = (run_commit(commit, Path(folder)) for commit in commits)
    for name in old:
        found = list(differences(old[name], new.get(name)))
        print(f"{name}: {'alike' if not found else 'differs'} ({len(old[name]['alerts'])} alerts)")
        print("".join(f"    {line[:400]}\n" for line in found[:20]), end="")
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
