"""A program's clock is its own: it is not asked on its behalf, and may be set while a run is recorded."""

from __future__ import annotations

import sys
import time
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from gradwatch import GradWatch, load_run
from gradwatch.cli import main
from gradwatch.runs.report import sink as report
from gradwatch.sinks.record import event_file, record_writer, run_metadata
from models import module_of
from training import quiet_trainer

pytestmark = pytest.mark.usefixtures("quiet")


def fitted(folder: Path, **options: Any) -> GradWatch:
    torch.manual_seed(0)
    watch = GradWatch()
    module = module_of(nn.Linear(3, 1), lambda net, batch, _: net(batch).square().mean(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(12, 3), batch_size=None)
    quiet_trainer(watch, max_epochs=3, default_root_dir=folder, **options).fit(module, data)
    return watch


@pytest.mark.parametrize("clock", ["time", "monotonic", "perf_counter"])
def test_a_clock_that_a_test_has_replaced_is_not_asked(tmp_path: Path, monkeypatch: Any, clock: str) -> None:
    """Lightning's own tests let such a clock advance by a second whenever it is asked."""
    fitted(tmp_path)  # what is imported later than that would have the replaced one
    numbers, askers = count(), set()

    def replaced() -> int:
        askers.add(sys._getframe(1).f_globals["__name__"].partition(".")[0])
        return next(numbers)

    monkeypatch.setattr(time, clock, replaced)
    assert fitted(tmp_path).verdict.notes == ()
    assert "gradwatch" not in askers


@pytest.mark.parametrize("logger", [False, True])
def test_a_clock_that_is_set_back_and_forward(tmp_path: Path, monkeypatch: Any, capsys: Any, logger: bool) -> None:
    """By two days at every reading, as after a suspend, or by the network's time."""
    now, jumps = [time.time()], cycle((-2e5, 3e5, -1e5, 0.5, -2e5, 2e5))

    def jumping() -> float:
        now[0] += next(jumps)
        return now[0]

    for module in (report, event_file, record_writer, run_metadata):
        monkeypatch.setattr(module, "time", jumping)
    used = TensorBoardLogger(tmp_path, name="run") if logger else False
    assert fitted(tmp_path, logger=used).verdict.notes == ()
    run = load_run(tmp_path)
    assert run.values["grad_norm"].steps.tolist() == list(range(36))
    assert run.ended
    assert run.notes == ()
    for command in ("ls", "report"):
        assert main([command, str(tmp_path)]) == 0
    assert "36" in capsys.readouterr().out
