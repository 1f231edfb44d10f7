"""How many Python calls of ours an ordinary step takes with everything at its default: a count, whatever the load."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gradwatch
from gradwatch import GradWatch
from gradwatch.engine import step_queue
from models import module_of
from training import quiet_trainer

HOME = str(Path(gradwatch.__file__).parent)
FIRST, LAST = 100, 400
MOST = 60
"""Calls a step, the mean from `FIRST` to `LAST`."""


def classifier(*, jumps: float = 1.0) -> pl.LightningModule:
    """`jumps`: by which the loss of every other batch is multiplied."""
    torch.manual_seed(0)
    body = [module for _ in range(4) for module in (nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())]
    net = nn.Sequential(*body, nn.Linear(64, 10))

    def loss(net: nn.Module, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1]) * (jumps if index % 2 else 1.0)

    return module_of(net, loss, lr=1e-3, kind=torch.optim.Adam)


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(index))
        return inputs, inputs[:, :10].argmax(1)


class Tokens(Pairs):
    """With lists of numbers beside the tensors, as of text that was not padded."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:  # type: ignore[override]
        return (*super().__getitem__(index), [[0] * 64 for _ in range(16)])


class CallCount(pl.Callback):
    def __init__(self, first: int = FIRST, last: int = LAST) -> None:
        self.calls: Counter[str] = Counter()
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.first:
            sys.setprofile(self._seen)
        if trainer.global_step == self.last:
            sys.setprofile(None)

    def on_exception(self, *_: Any) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            self.calls[frame.f_code.co_filename.removeprefix(HOME + "/").split("/")[0]] += 1


@pytest.mark.usefixtures("quiet")
def test_calls_of_an_ordinary_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_queue, "monotonic", lambda: 0.0)  # blocks of 64 steps, however slow the machine is
    count = CallCount()
    trainer = quiet_trainer(GradWatch(), count, max_epochs=-1, max_steps=LAST + 20, logger=TensorBoardLogger(tmp_path))
    trainer.fit(classifier(), DataLoader(Pairs(), batch_size=None))
    steps = {folder: calls / (LAST - FIRST) for folder, calls in count.calls.items()}
    assert sum(steps.values()) <= MOST, steps


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("pairs", "accumulated", "jumps", "most"),
    [
        pytest.param(Pairs(), 4, 1.0, 195, id="accumulated"),
        pytest.param(Tokens(), 1, 1.0, 105, id="tokens"),
        pytest.param(Pairs(), 1, 30.0, 90, id="jumps"),
    ],
)
def test_calls_of_a_step(
    pairs: Pairs, accumulated: int, jumps: float, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several micro-batches, of batches that are more than tensors, and of gradients that jump up and down."""
    monkeypatch.setattr(step_queue, "monotonic", lambda: 0.0)
    first, last = 66, 126  # none of them is sampled
    count = CallCount(first, last)
    options = {"max_epochs": -1, "max_steps": last + 2, "accumulate_grad_batches": accumulated}
    trainer = quiet_trainer(GradWatch(), count, logger=TensorBoardLogger(tmp_path), **options)
    trainer.fit(classifier(jumps=jumps), DataLoader(pairs, batch_size=None))
    steps = {folder: calls / (last - first) for folder, calls in count.calls.items()}
    assert sum(steps.values()) <= most, steps
