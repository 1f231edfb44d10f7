"""Copies that land late: on a device of which nothing comes to the host before it is asked to."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fake_devices import LateCopies
from gradwatch import SkipNonFinite, Watch
from gradwatch.engine.pending_actions import PendingActions
from gradwatch.measure.device_buffer import IN_FLIGHT, DeviceBuffer, HostCopy, RowBlock
from training import fit

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(5))
def test_numbers_that_land_out_of_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a copy has landed its memory holds other numbers, and what was sent may be written over."""
    copies, drawn = LateCopies(monkeypatch), random.Random(seed)
    sent: list[tuple[float, HostCopy]] = []
    source = torch.zeros(7)
    for number in range(200):
        source.fill_(number)
        sent.append((float(number), HostCopy({"a": source[:2], "b": source[2:6].view(2, 2), "c": source[6]})))
        if drawn.random() < 0.3:
            copies.land(drawn.choice(range(len(copies.under_way))))
        for expected, copy in drawn.sample(sent, min(3, len(sent))):
            if copy.done:
                assert copy.wait()["a"].tolist() == [expected] * 2
    for expected, copy in sent:
        found = {name: numbers.tolist() for name, numbers in copy.wait().items()}
        assert found == {"a": [expected] * 2, "b": [[expected] * 2] * 2, "c": expected}


def test_a_block_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    LateCopies(monkeypatch)
    buffer = DeviceBuffer(CPU, 2, ("row",))
    block = RowBlock(buffer["row"])
    for number in range(5):
        buffer["row"].fill_(number)
        block.add(torch.tensor(float(10 * number)))
    copy = block.send()
    assert not copy.done
    numbers = block.wait()
    assert numbers.slots[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert numbers.losses.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0]


def test_no_event_is_asked_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LateCopies(monkeypatch)
    copy = HostCopy({"a": torch.ones(1)})
    copies.land(0)
    monkeypatch.setattr("gradwatch.measure.device_buffer.is_capturing", lambda: True)
    assert not copy.done
    assert copies.asked == 0
    monkeypatch.setattr("gradwatch.measure.device_buffer.is_capturing", lambda: False)
    assert copy.done


def test_a_copy_is_waited_for_after_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many actions there are in a step."""
    LateCopies(monkeypatch)
    pending, done = PendingActions(), []
    for step in range(IN_FLIGHT + 3):
        pending.steps += 1
        for part in range(4):
            pending.then(lambda at=(step, part): done.append(at), HostCopy({"a": torch.ones(1)}))
        pending.proceed()
        assert len(done) == 4 * max(0, step - IN_FLIGHT)


def test_a_training_whose_numbers_come_late_is_recorded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> Watch:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Watch(model, sinks=(), rules=(), budget=0.5) as watch:
            for _ in range(80):
                optimizer.zero_grad()
                loss = model(torch.randn(16, 4)).square().mean()
                loss.backward()
                watch.step(optimizer, loss=loss)
                optimizer.step()
        assert watch.verdict.notes == ()
        return watch

    expected = trained().history
    LateCopies(monkeypatch)
    found = trained().history
    assert list(found.steps) == list(expected.steps)
    for statistic in (
        "grad_norm",
        "weight_norm",
        "update_ratio",
        "zero_fraction",
        "signal_rms",
        "output_rms",
        "arrived_norm",
    ):
        assert np.array_equal(found.series(statistic), expected.series(statistic), equal_nan=True), statistic


def test_a_loss_that_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the output of a CUDA graph is when the graph runs again: what was kept of it stays."""
    from lightning.pytorch import LightningModule

    from gradwatch import GradWatch
    from gradwatch.sinks.memory import Memory

    static = torch.zeros(())

    class Static(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            static.copy_(value.detach())
            return static.view_as(static)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.layer.weight)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return Static.apply(self.layer(batch).sum())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    memory = Memory()
    data = torch.utils.data.DataLoader(torch.arange(1.0, 9.0).view(-1, 1), batch_size=1)
    fit(Net(), GradWatch(sinks=(memory,), rules=()), data=data, accumulate_grad_batches=4)
    assert [record.scalars["loss"] for record in memory.records] == pytest.approx([10.0 / 4, 26.0 / 4])


def test_while_steps_are_not_finite_their_numbers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is seen when the optimizer has moved; from then on before it moves, until one is finite again."""
    copies = LateCopies(monkeypatch)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    landed = []
    with Watch(model, sinks=(), rules=(), signals="off", interventions=[SkipNonFinite(dry_run=True)]) as watch:
        for step in range(12):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * (torch.nan if 4 <= step < 8 else 1.0)).backward()
            for parameter in model.parameters() if 4 <= step < 8 else ():
                parameter.data.nan_to_num_()
            watch.step(optimizer)
            landed.append(not copies.under_way)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_()
            optimizer.step()
            copies.land_all()
    assert landed[:5] == [False] * 5
    assert landed[6:8] == [True] * 2
    assert landed[-1] is False
