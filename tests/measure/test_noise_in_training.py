"""The noise scale of trainings whose noise is known: the gradient of one example is the example itself."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ranks
from gradwatch import GradWatch
from gradwatch.sinks.memory import Memory
from modes import quiet
from training import quiet_trainer

SIZE, MEAN, EXAMPLES = 200, 0.5, 4
TRUE = 1 / MEAN**2
"""tr(covariance) / |mean|^2 of examples of independent N(MEAN, 1) elements: in examples, whatever their size."""


class Linear(pl.LightningModule):
    """The loss is the mean of w x: its gradient is the mean of the x, at any w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))
        self.bias = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return (batch.pop() @ self.weight).mean() + 0 * self.bias.sum()  # what is counted is there before

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trained(options: dict[str, Any], *, precision: str = "", several: int = 1) -> list[dict[str, float]]:
    """The headlines at every step."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if precision == "fp16":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)
        options = {**options, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    if several > 1:
        options = {**options, "strategy": DDPStrategy(process_group_backend="gloo"), "devices": several}
    data = torch.randn(several * 100 * EXAMPLES, SIZE, generator=torch.Generator().manual_seed(3)) + MEAN
    memory = Memory()
    with quiet():
        trainer = quiet_trainer(GradWatch(sinks=[memory], budget=0.99), max_epochs=2, **options)
        trainer.fit(Linear(), DataLoader(TensorDataset(data), EXAMPLES))
    return [dict(record.scalars) for record in memory.records]


def check(records: list[dict[str, float]]) -> None:
    known = [record for record in records if "noise_scale" in record]
    assert len(known) >= 5
    for record in known:
        assert record["examples"] == EXAMPLES
        assert 0 < record["noise_scale_error"] < record["noise_scale"]
        assert abs(record["noise_scale"] - TRUE) < 3 * record["noise_scale_error"] + 0.1 * TRUE


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "precision"), [(2, "fp16"), (3, "")])
def test_micro_batches(accumulate: int, precision: str) -> None:
    """With 3, the last window of each epoch has one micro-batch only."""
    check(trained({"accumulate_grad_batches": accumulate}, precision=precision))


def several(accumulate: int) -> list[dict[str, float]]:
    return trained({"accumulate_grad_batches": accumulate}, several=ranks.SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks(accumulate: int) -> None:
    records, _ = ranks.run(several, accumulate)
    check(records)


def test_one_micro_batch_says_nothing_of_its_noise() -> None:
    assert not any("noise_scale" in record for record in trained({}))
