"""Wherever the logs are, and whatever becomes of that place in mid-run, a run ends as it would without us."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

from gradwatch import GradWatch, load_run
from gradwatch.cli import main
from models import module_of
from reference import bits, hooks_on
from training import quiet_trainer

pytestmark = pytest.mark.usefixtures("quiet")

STEPS, CHANGED = 40, 15
LOGGERS: dict[str, Callable[[Path], Any]] = {
    "none": lambda folder: False,
    "csv": lambda folder: CSVLogger(folder, name="run"),
    "tensorboard": lambda folder: TensorBoardLogger(folder, name="run"),
}


def trained(folder: Path, logger: str, *callbacks: Any) -> tuple[dict[str, bytes], str]:
    """The weights, and the class of the error that ended the fit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    module = module_of(net, lambda net, batch, _: net(batch).square().mean(), lr=0.01, logged="loss")
    trainer = quiet_trainer(
        *callbacks, default_root_dir=folder, logger=LOGGERS[logger](folder), log_every_n_steps=5, max_epochs=2
    )
    error = ""
    try:
        trainer.fit(module, DataLoader(torch.randn(STEPS // 2, 4), batch_size=None))
    except Exception as raised:
        error = type(raised).__name__
    assert hooks_on(module, *trainer.optimizers) == []
    return bits(module), error


NAMES = ("a run  (of today) [0] *", "l\u00e4ufe \u5c42 \U0001f525", "100%25 & #3?", "x" * 200, "-o")


@pytest.mark.parametrize("logger", LOGGERS)
def test_names_of_folders(tmp_path: Path, logger: str) -> None:
    """Spaces, patterns, every script, what addresses use, the longest, and one like an option: each in another."""
    watch, folder = GradWatch(), tmp_path.joinpath(*NAMES)
    _, error = trained(folder, logger, watch)
    assert error == ""
    assert watch.verdict.notes == ()
    assert load_run(folder).values["grad_norm"].steps.tolist() == list(range(STEPS))
    assert len(list(folder.rglob("gradwatch_report.html"))) == 1
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert main(["ls", str(tmp_path)]) == 0


@pytest.mark.parametrize("logger", LOGGERS)
def test_a_folder_that_is_a_link(tmp_path: Path, logger: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to("there")
    watch = GradWatch()
    trained(tmp_path / "here", logger, watch)
    assert watch.verdict.notes == ()
    assert (tmp_path / "here").is_symlink()
    for name in ("here", "there"):
        assert load_run(tmp_path / name).values["grad_norm"].steps.tolist() == list(range(STEPS))


def gone(folder: Path) -> None:
    shutil.rmtree(folder)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


def elsewhere(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.with_name("other").mkdir()
    folder.symlink_to("other")


def a_loop(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder.name)


def locked(folder: Path) -> None:
    """Not for root, who may write all the same."""
    folder.chmod(0o500)


class Changes(pl.Callback):
    """Makes another thing of a folder in mid-run."""

    def __init__(self, change: Callable[[Path], None], folder: Path) -> None:
        self.change, self.folder = change, folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == CHANGED:
            self.change(self.folder)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
@pytest.mark.parametrize("logger", ["none", "tensorboard", pytest.param("csv", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", [gone, emptied, a_file, elsewhere, a_loop, locked])
def test_a_folder_that_becomes_another_thing(tmp_path: Path, change: Callable[[Path], None], logger: str) -> None:
    """The user's own logger may end the run there, and then it ends as it did."""
    watch, ends = GradWatch(), []
    for name, watches in (("alone", ()), ("watched", (watch,))):
        folder = tmp_path / name / "logs"
        folder.mkdir(parents=True)
        ends.append(trained(folder, logger, *watches, Changes(change, folder)))
    assert ends[0] == ends[1]
    assert ends[1][1] or len(watch.history) == STEPS


@pytest.mark.parametrize("place", ["/proc/gradwatch", "/dev/null", "/dev/full"])
def test_where_nothing_can_be_written(place: str) -> None:
    watch = GradWatch()
    alone, watched = trained(Path(place), "none"), trained(Path(place), "none", watch)
    assert alone == watched
    assert len(watch.history) == STEPS
    assert all("sink" in note or "incident" in note for note in watch.verdict.notes)
