"""The norms after the Trainer's clipping, of every step: where they follow from the total, and where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradwatch import GradWatch
from gradwatch.core.schedule import FIRST_STEPS
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.sinks.memory import Memory
from training import quiet_trainer

STEPS, LIMIT = 90, 0.05


class Clipped(pl.LightningModule):
    """Notes the norms of the gradients that its optimizer uses."""

    nan_at = -1
    """The batch that gives the last bias, and no other, a gradient of NaN; the weights are mended after it."""

    def __init__(self, clip: Callable[[Any, Any, int], object] | None, loss_weight: float = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        self.clip, self.loss_weight = clip, loss_weight
        self.used: list[list[float]] = []

    def training_step(self, seed: Tensor, index: int) -> Tensor:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(int(seed)))
        loss = self.loss_weight * (self.net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        return loss + float("nan") * self.net[3].bias.sum() if int(seed) == self.nan_at else loss

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data.nan_to_num_(0.01)

    def configure_gradient_clipping(self, optimizer: Any, *limits: Any, **names: Any) -> None:
        if self.clip is None:
            super().configure_gradient_clipping(optimizer, *limits, **names)
        else:
            self.clip(self, optimizer, len(self.used))
        self.used.append([float(p.grad.double().norm()) for p in self.net.parameters() if p.grad is not None])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def by_norm(module: Clipped, optimizer: Any, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), LIMIT)


def by_value(module: Clipped, optimizer: Any, step: int) -> None:
    torch.nn.utils.clip_grad_value_(module.parameters(), 1e-3)


def by_layer(module: Clipped, optimizer: Any, step: int) -> None:
    for layer in module.net:
        if parameters := list(layer.parameters()):
            torch.nn.utils.clip_grad_norm_(parameters, LIMIT)


def by_layer_later(module: Clipped, optimizer: Any, step: int) -> None:
    (by_layer if step >= 2 * FIRST_STEPS else by_norm)(module, optimizer, step)


def by_norm_and_half_of_a_layer(module: Clipped, optimizer: Any, step: int) -> None:
    by_norm(module, optimizer, step)
    for parameter in module.net[1].parameters():
        parameter.grad *= 0.5


def half_of_a_layer_later(module: Clipped, optimizer: Any, step: int) -> None:
    by_norm(module, optimizer, step)
    if step >= 2 * FIRST_STEPS:
        for parameter in module.net[0].parameters():
            parameter.grad *= 0.5


def fit(
    clip: Callable[[Any, Any, int], object] | None, *, loss_weight: float = 10, **options: Any
) -> tuple[Clipped, Memory, Any]:
    module, memory = Clipped(clip, loss_weight), Memory()
    trainer = quiet_trainer(GradWatch(sinks=(memory,), **options), max_epochs=1, gradient_clip_val=LIMIT)
    trainer.fit(module, DataLoader(torch.arange(STEPS)))  # type: ignore[arg-type]
    return module, memory, trainer


def shown(memory: Memory, module: Clipped) -> np.ndarray[Any, Any]:
    names = [f"net.{name}" for name, _ in module.net.named_parameters()]
    return np.array([[record.value("grad_norm_clipped", name) for name in names] for record in memory.records])


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_the_label_names_the_clipping_that_follows(limit: float | None) -> None:
    class Plain(Clipped):
        configure_gradient_clipping = pl.LightningModule.configure_gradient_clipping

    labels = []
    for module in (Plain(None), Clipped(by_value)):
        memory = Memory()
        trainer = quiet_trainer(GradWatch(sinks=(memory,)), max_epochs=1, gradient_clip_val=limit)
        trainer.fit(module, DataLoader(torch.arange(3)))  # type: ignore[arg-type]
        labels.append(memory.run.labels["grad_norm"])
    plain = f"before clipping (gradient_clip_val={limit} by norm)" if limit else "as the optimizer first receives them"
    assert labels == [
        f"gradient norms {plain}, every step",
        "gradient norms before clipping (the model's configure_gradient_clipping), every step",
    ]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("clip", "loss_weight"),
    [(None, 10), (None, 1e-22), (by_norm, 10), (by_value, 10), (by_layer, 10), (by_norm_and_half_of_a_layer, 1e-9)],
)
def test_every_step_shows_what_the_optimizer_used(clip: Any, loss_weight: float) -> None:
    module, memory, _ = fit(clip, loss_weight=loss_weight)
    np.testing.assert_allclose(shown(memory, module), module.used, rtol=1e-5)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("later", "loss_weight"), [(by_layer_later, 10), (half_of_a_layer_later, 1e-9)])
def test_a_clipping_that_becomes_another_is_not_taken_for_the_first(later: Any, loss_weight: float) -> None:
    module, memory, _ = fit(later, loss_weight=loss_weight)
    numbers, used = shown(memory, module), np.array(module.used)
    known = ~np.isnan(numbers).any(axis=1)
    np.testing.assert_allclose(numbers[known], used[known], rtol=1e-5)
    assert known[: 2 * FIRST_STEPS].all()
    assert known[-10:].all(), "from the next block on every gradient is read"


@pytest.mark.usefixtures("quiet")
def test_few_gradients_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on sampled steps, where the rule is checked on all of them."""
    calls: list[int] = []
    read = GradientReader.remeasure
    monkeypatch.setattr(GradientReader, "remeasure", lambda *args, **names: calls.append(1) or read(*args, **names))
    fit(None, budget=None)
    sampled = FIRST_STEPS + len(range(25, STEPS, 25))
    assert len(calls) == sampled
    calls.clear()
    monkeypatch.setattr(Clipped, "nan_at", 40)
    fit(None, budget=None)
    assert sampled <= len(calls) < STEPS / 3, "a total of NaN makes all gradients NaN: no other clipping"


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("layers", [["*", "!net.3"]])
def test_the_total_of_some_layers_tells_nothing(layers: Any) -> None:
    module, memory, _ = fit(None, layers=layers)
    numbers = [record.value("grad_norm_clipped", "net.0.weight") for record in memory.records]
    np.testing.assert_allclose(numbers, [used[0] for used in module.used], rtol=1e-5)
