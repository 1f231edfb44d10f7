"""Over processes that average their gradients the numbers are true, the weights the same, and rank 0 alone reports."""

from __future__ import annotations

import json
import logging
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers import subprocess_script

import forks
import ranks
from ddp_training import BATCHES, SHARED, VARIANTS, PlannedError, SeededModule, fit_on_ranks, numbers_of, trained
from gradwatch import GradWatch, load_run


def compare(records: list[dict[str, Any]], truths: list[dict[str, float]], statistic: str) -> None:
    assert len(records) == len(truths)
    for record, truth in zip(records, truths, strict=True):
        shown = [record["values"][statistic][site] for site in truth]
        np.testing.assert_allclose(shown, list(truth.values()), 1e-5, err_msg=f"{statistic} at {record['step']}")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_true_and_harmless(variant: str) -> None:
    module, options = VARIANTS[variant]
    reported = ranks.run(trained, module, options)
    for rank in reported:
        assert not rank["warnings"]
        assert len(rank["records"]) == rank["steps"] == len(rank["before"]) > 0
        compare(rank["records"], rank["before"], "grad_norm")
        if module.get("manual"):
            assert [record["optimizer"] for record in rank["records"]] == [0, 0, 1] * (BATCHES // 2)
        else:
            compare(rank["records"], rank["after"], "grad_norm_clipped")
        watched, alone = rank["bits"]
        assert watched == alone
        hooks, hooks_without_us = rank["hooks"]
        assert hooks == hooks_without_us
        windows = _windows(options.get("accumulate_grad_batches", 1))
        if len(windows) < BATCHES:
            assert [record["scalars"]["accumulated"] for record in rank["records"]] == windows
            assert {record["scalars"]["accumulate"] for record in rank["records"]} == {float(windows[0])}
    first, second = reported
    assert first["reported"] == len(first["records"])
    assert f"mean over {ranks.SIZE} ranks" in first["label"]
    assert len([line for line in first["lines"] if line.startswith("GradWatch watches")]) == 1
    assert second["reported"] == 0
    assert second["lines"] == []
    for one, other in zip(first["records"], second["records"], strict=True):
        for statistic in SHARED:  # NaN at the same steps, too: all ranks sample alike
            assert repr(one["values"][statistic]) == repr(other["values"][statistic])
    if variant == "default":
        shown = [record["values"]["grad_norm"]["total"] for record in first["records"]]
        for one, own, other in zip(shown, first["own"], second["own"], strict=True):
            assert min(abs(one / own - 1), abs(one / other - 1), abs(own / other - 1)) > 1e-3
    if variant == "unused":
        for record in (*first["records"], *second["records"]):
            assert set(record["missing"]) == {"nowhere", "nowhere.weight", "nowhere.bias"}
            assert record["values"]["grad_norm"]["on_rank_0"] > 0


def _windows(accumulate: int) -> list[int]:
    ends = [*range(0, BATCHES, accumulate), BATCHES]
    return [end - begin for begin, end in pairwise(ends)]


class Report(pl.Callback):
    """Writes what a rank has to tell, and the log with the rank's number in each line."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        logging.basicConfig(level=logging.INFO, format=f"<{trainer.global_rank}> %(name)s: %(message)s")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        reported = {"records": numbers_of(trainer.callbacks[0]), "before": pl_module.before, "pid": os.getpid()}
        Path(self.folder, f"{trainer.global_rank}.json").write_text(json.dumps(reported))


def launched(strategy: str, folder: str) -> None:
    """A user's script: a fit that goes well, and under "ddp" another one that does not."""
    watch = GradWatch()
    fit_on_ranks(SeededModule(), watch, Report(folder), strategy=strategy, default_root_dir=folder)
    print("the first is over\n", end="", flush=True)  # in one piece: both ranks write to one pipe
    if strategy == "ddp":
        fit_on_ranks(SeededModule(odd=("raise", 1)), watch, strategy=strategy, default_root_dir=folder)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_notebook"])
def test_lightning_starts_the_processes(strategy: str, tmp_path: Path) -> None:
    ended = ranks.launch(launched, strategy, str(tmp_path))
    assert "the first is over" in ended.output, ended.output
    assert ended.left == ()
    if strategy == "ddp":
        assert ended.code not in (0, None)
        assert PlannedError.__name__ in ended.output
    else:
        assert ended.code == 0, ended.output
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks.SIZE))
    assert first["pid"] != second["pid"]
    for rank in (first, second):
        assert len(rank["records"]) == BATCHES
        compare(rank["records"], rank["before"], "grad_norm")
    lines = [line for line in ended.output.splitlines() if "gradwatch: " in line]
    assert len([line for line in lines if "GradWatch watches" in line]) == 1 + (strategy == "ddp"), ended.output
    assert all(line.startswith("<0> ") for line in lines), ended.output
    assert "failed" not in ended.output


class Forked:
    """Stands in for `subprocess.Popen` in Lightning's launcher: the script again, in a fork, of the same session."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: None) -> None:
        if not os.fork():
            forks.become((command[1:], os.getcwd(), env), os.dup(1), os.dup(2), [])


def killed(rank: str, watched: str, folder: str) -> None:
    """A user's script, of which a rank is killed, as by a system without memory."""
    # it looks every five seconds, and kills a script that has not ended by then: a matter of chance
    _ChildProcessObserver._run = lambda observer: True  # type: ignore[method-assign]
    subprocess_script.subprocess = SimpleNamespace(Popen=Forked)  # type: ignore[assignment]
    watches = [GradWatch()] if watched else []
    fit_on_ranks(SeededModule(odd=("kill", int(rank))), *watches, strategy="ddp", default_root_dir=folder)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_killed_rank_ends_the_script_as_without_us(rank: str, tmp_path: Path) -> None:
    """What the other rank has recorded by then is there."""
    alone, watched = (ranks.launch(killed, rank, name, str(tmp_path), timeout=100) for name in ("", "watched"))
    assert watched.code == alone.code
    assert watched.code not in (None, 0), watched.output
    assert len(watched.left) == len(alone.left), "processes that go on"
    assert "GradWatch failed" not in watched.output
    if rank == "1":
        steps = load_run(tmp_path).values["grad_norm"].steps
        assert steps.tolist() == list(range(len(steps)))
