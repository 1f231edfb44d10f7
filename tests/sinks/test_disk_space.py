"""What GradWatch writes ends no logging of the user's: under a limit on the size of files, and on a disk that fills."""

from __future__ import annotations

import csv
import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import ranks
from gradwatch import GradWatch
from gradwatch.core import disk_space
from gradwatch.core.disk_space import MIN_FILE_LIMIT, RESERVED_BYTES, NoRoom
from gradwatch.core.record import Run
from gradwatch.runs.arrays import read
from gradwatch.runs.report.sink import Report
from gradwatch.sinks import incident_file
from gradwatch.sinks.logger_files import writer_for
from gradwatch.sinks.record import event_file
from gradwatch.sinks.record.recorder import Recorder
from gradwatch.sinks.tensorboard.sink import TensorBoard
from models import module_of
from sink_inputs import HEALTHY, feed, layout_of, record_of, scalars_in
from training import quiet_trainer

pytestmark = pytest.mark.usefixtures("quiet")

LOGGERS = {"tensorboard": TensorBoardLogger, "csv": CSVLogger}
MOUNTED = 2 * 2**20
"""Bytes that are free, beyond the reserve, on the file system of the test that has one of its own."""


def linear_layers(nan_at: int) -> Any:
    def loss(net: torch.nn.Module, batch: Any, index: int) -> Any:
        return net(batch).square().mean() * (float("nan") if index == nan_at else 1.0)

    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    return module_of(net, loss, lr=0.001, logged="loss")


def logs_of_fit(folder: Path, kind: str, steps: int, *callbacks: Any, nan_at: int = -1, saves: bool = True) -> Any:
    """The folder of the logs, and what ended the fit, if anything did."""
    torch.manual_seed(0)
    savers = [ModelCheckpoint(save_top_k=-1, every_n_train_steps=steps // 2)] * saves
    options = {"log_every_n_steps": 1, "default_root_dir": folder, "enable_checkpointing": saves}
    trainer = quiet_trainer(*callbacks, *savers, logger=LOGGERS[kind](folder), **options)
    try:
        trainer.fit(linear_layers(nan_at), DataLoader(torch.randn(steps, 2)))
    except Exception as error:
        return Path(trainer.log_dir), error
    return Path(trainer.log_dir), None


def losses(log_dir: Path, kind: str) -> list[int]:
    """The steps at which the user's number was logged."""
    if kind == "tensorboard":
        return scalars_in(log_dir)["loss"]
    return [int(row["step"]) for row in rows(log_dir) if row.get("loss")]


def rows(log_dir: Path) -> list[dict[str, str]]:
    with open(log_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def states(log_dir: Path) -> list[bool]:
    """Of each checkpoint, whether our state is in it."""
    paths = sorted((log_dir / "checkpoints").iterdir())
    return ["GradWatch" in torch.load(path, weights_only=False)["callbacks"] for path in paths]


@contextmanager
def limited(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    sys.dont_write_bytecode = True  # Python would cut the file of a module that is imported within
    try:
        yield
    finally:
        sys.dont_write_bytecode = False
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- a limit on the size of files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limit", "steps"),
    [
        ("tensorboard", 50_000, 150),
        ("csv", 50_000, 150),
    ],
)
def test_a_limit_that_the_users_own_files_do_not_reach_is_not_reached(
    tmp_path: Path, kind: str, limit: int, steps: int
) -> None:
    watch = GradWatch()
    with limited(limit):
        log_dir, error = logs_of_fit(tmp_path, kind, steps, watch)
    assert error is None
    assert losses(log_dir, kind) == list(range(steps)), "none is lost"
    assert states(log_dir) == [False, False]
    assert max(path.stat().st_size for path in log_dir.rglob("*") if path.is_file()) <= limit
    run = read(log_dir)
    assert len(run.values["grad_norm"].steps) > 20, "what had room is there"
    assert not any("event" in note for note in run.notes), "whole events"
    said = "\n".join(watch.verdict.notes)
    assert "checkpoints are without GradWatch's state, with which a resumed run goes on: a file can have" in said
    record = "TensorBoard" if kind == "tensorboard" else "Recorder"
    assert f"the sink {record} failed and was switched off: NoRoom: a file can have" in said


def test_a_limit_that_they_reach_ends_the_run_where_it_ends_it_without_us(tmp_path: Path) -> None:
    logged = []
    for watches in ([GradWatch()], []):
        with limited(2_000):
            log_dir, error = logs_of_fit(tmp_path / str(len(logged)), "csv", 400, *watches, saves=False)
        assert isinstance(error, OSError)
        logged.append((log_dir / "metrics.csv").read_bytes())
    assert logged[0] == logged[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tensorboard_logger_ends_where_it_ends_without_us(tmp_path: Path) -> None:
    """Give or take what its thread had waiting when it died."""
    logged = []
    for watches in ([GradWatch()], []):
        with limited(12_000):
            log_dir, error = logs_of_fit(tmp_path / str(len(logged)), "tensorboard", 200, *watches, saves=False)
        assert error is not None
        (file,) = log_dir.glob("events.out.*")
        logged.append(scalars_in(file)["loss"])
    assert logged[0] == logged[1]
    assert len(logged[0]) > 100


def of_a_process(folder: str, limit: str, steps: str) -> None:
    """With the signal's default action, which ends a process at the limit; Python ignores it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    watch = GradWatch()
    log_dir, error = logs_of_fit(Path(folder), "tensorboard", int(steps), watch, nan_at=int(steps) - 2)
    print("\n" + json.dumps([str(log_dir), repr(error), watch.verdict.notes]))


@pytest.mark.slow
def test_a_process_that_a_limit_ends_is_not_ended_by_us(tmp_path: Path) -> None:
    ended = ranks.launch(of_a_process, str(tmp_path), "40000", "150")
    assert ended.code == 0, ended.output
    log_dir, error, notes = json.loads(next(line for line in ended.output.splitlines() if line.startswith("[")))
    assert error == "None"
    assert losses(Path(log_dir), "tensorboard") == list(range(150))
    failed = [note.split()[2] for note in notes if note.startswith("the sink")]
    assert {"TensorBoard", "FlightRecorder"} <= set(failed), notes
    assert not list(tmp_path.rglob("*incident*"))


def test_a_limit_that_no_one_comes_near_leaves_all_as_it_is(tmp_path: Path) -> None:
    """As it is set on some clusters."""
    watch = GradWatch()
    with limited(MIN_FILE_LIMIT):
        log_dir, error = logs_of_fit(tmp_path, "csv", 20, watch)
    assert error is None
    assert not watch.verdict.notes
    assert [int(row["step"]) for row in rows(log_dir) if row["gradwatch/alerts"]] == list(range(20))
    assert states(log_dir) == [True, True]


# ---- a disk that fills


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A disk that says what is set here."""
    disk = SimpleNamespace(free=10 * RESERVED_BYTES, total=100 * RESERVED_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: disk)
    monkeypatch.setattr(event_file, "CHECK_SECONDS", 0.0)
    return disk


class Fills(pl.Callback):
    """Somebody fills the disk up to the reserve."""

    def __init__(self, disk: Any, at: int) -> None:
        self.disk, self.at = disk, at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.disk.free = RESERVED_BYTES - 1


@pytest.mark.parametrize("kind", ["tensorboard", "csv"])
def test_on_a_disk_that_fills_ours_ends_and_the_users_goes_on(tmp_path: Path, disk: Any, kind: str) -> None:
    watch = GradWatch()
    log_dir, error = logs_of_fit(tmp_path, kind, 120, Fills(disk, 70), watch, nan_at=110)
    assert error is None
    assert losses(log_dir, kind) == list(range(120))
    assert states(log_dir) == [False, True]  # by name: step 120 comes before step 60
    run = read(log_dir)
    assert 40 < len(run.values["grad_norm"].steps) <= 70
    assert not list(log_dir.rglob("*report*"))
    assert not list(log_dir.rglob("*incident*"))
    if kind == "csv":
        logged = [int(row["step"]) for row in rows(log_dir) if row["gradwatch/alerts"]]
        assert logged == list(range(len(logged)))
        assert 40 < len(logged) <= 70
    said = "\n".join(watch.verdict.notes)
    assert "NoRoom: 67.1 MB are free on the disk of " in said
    assert ", and the last 67.1 are left to the training" in said


def test_a_file_system_that_knows_no_size_is_written_to(tmp_path: Path, disk: Any) -> None:
    disk.free = disk.total = 0
    watch = GradWatch()
    log_dir, _ = logs_of_fit(tmp_path, "csv", 10, watch)
    assert not watch.verdict.notes
    assert read(log_dir).ended


def test_a_checkpoint_is_held_only_where_there_is_room_for_the_next_ones(tmp_path: Path, disk: Any) -> None:
    saved, beside = tmp_path / "a.ckpt", tmp_path / "incident.pt"
    saved.write_bytes(bytes(1000))
    disk.free = RESERVED_BYTES + 1999
    assert incident_file.link_checkpoint(str(saved), beside) == str(saved)
    assert not beside.with_suffix(".ckpt").exists()
    disk.free = RESERVED_BYTES + 2000
    assert incident_file.link_checkpoint(str(saved), beside) == str(beside.with_suffix(".ckpt"))


def test_pictures_for_the_users_own_file_wait_for_no_room(tmp_path: Path, disk: Any) -> None:
    logger, picture = TensorBoardLogger(tmp_path), np.zeros((4, 4, 3), dtype=np.uint8)
    write = writer_for(logger)
    assert write is not None
    disk.free = RESERVED_BYTES - 1
    with pytest.raises(NoRoom):
        write(logger, "picture", picture, 0)
    disk.free = RESERVED_BYTES
    with limited(1_000_000), pytest.raises(NoRoom):
        write(logger, "picture", picture, 0)
    write(logger, "picture", picture, 0)


def test_a_page_that_cannot_be_written_leaves_no_half_of_itself(tmp_path: Path, monkeypatch: Any) -> None:
    sink, layout = Report(folder=tmp_path), layout_of("a")
    sink.open(Run(layout, "run"))
    feed(sink, record_of(layout, 0, [1.0]))
    monkeypatch.setattr(disk_space, "max_file_size", lambda: None)  # as with a quota that the system does not report
    with limited(1000), pytest.raises(OSError, match="File too large"):
        sink.close(HEALTHY)
    assert not list(tmp_path.iterdir())


def test_where_a_write_fails_the_record_ends_with_a_whole_event(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk_space, "max_file_size", lambda: None)
    sink, layout = Recorder(folder=tmp_path, every_n_steps=1), layout_of("a", "b")
    sink.open(Run(layout, "run"))
    records = [record_of(layout, step, [1.0, 2.0]) for step in range(100)]
    with limited(9_000), pytest.raises(OSError, match="No space left on device"):
        [feed(sink, record) for record in records]
    run = read(tmp_path)
    assert 20 < len(run.values["grad_norm"].steps) < 100
    assert not run.notes, "nothing is torn"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with `MOUNTED` bytes beyond the reserve."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    size = f"size={RESERVED_BYTES + MOUNTED}"
    command = shutil.which("mount")
    if not command or subprocess.run([command, "-t", "tmpfs", "-o", size, "tmpfs", folder], check=False).returncode:
        pytest.skip("this process may not mount a file system of its own")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_real_disk_is_filled_up_to_the_reserve_and_by_the_user_alone_beyond_it(
    mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "CHECK_SECONDS", 0.0)  # a fast fit is over before the disk is asked again
    (mounted / "others").write_bytes(bytes(MOUNTED - 250_000))
    watch = GradWatch()
    log_dir, error = logs_of_fit(mounted, "tensorboard", 300, watch)
    assert error is None
    assert losses(log_dir, "tensorboard") == list(range(300))
    assert any("sink TensorBoard failed and was switched off: NoRoom" in note for note in watch.verdict.notes)
    own = [path for path in log_dir.iterdir() if "gradwatch" in path.name]
    assert 100_000 < sum(path.stat().st_size for path in own) < 250_000
    users = [path for path in log_dir.rglob("*") if path.is_file() and path not in own]
    pages = sum(path.stat().st_size + 4096 for path in users)
    assert shutil.disk_usage(mounted).free > RESERVED_BYTES - pages


def test_a_disk_smaller_than_the_reserve_is_the_users_alone(mounted: Path) -> None:
    (mounted / "others").write_bytes(bytes(MOUNTED + RESERVED_BYTES - 1_000_000))
    log_dir, error = logs_of_fit(mounted, "tensorboard", 50, GradWatch())
    assert error is None
    assert losses(log_dir, "tensorboard") == list(range(50))
    assert not [path for path in mounted.rglob("*") if "gradwatch" in path.name]


# ---- the writer of the user's


def test_nothing_of_ours_goes_through_the_users_writer(tmp_path: Path) -> None:
    log_dir, _ = logs_of_fit(tmp_path, "tensorboard", 30, GradWatch(), nan_at=20)
    (file,) = log_dir.glob("events.out.*")
    assert b"gradwatch" not in file.read_bytes()
    (own,) = log_dir.glob("events.gradwatch.*")
    assert b"gradwatch/record/" in own.read_bytes()
    assert own.name < file.name, "TensorBoard's slower loader follows the last file of a folder: the user's"


class Plain:
    """A writer of another make."""

    def add_scalar(self, tag: str, number: float, step: int) -> None:
        raise AssertionError(f"{tag} was written")


def test_a_writer_of_another_make_gets_nothing_under_a_limit() -> None:
    with limited(1_000_000), pytest.raises(NoRoom):
        TensorBoard(writer=Plain()).open(Run(layout_of("a"), "run"))


class PlainLogger(TensorBoardLogger):
    @property
    def experiment(self) -> Any:
        return Plain()


def test_nor_does_another_writer_before_it(tmp_path: Path) -> None:
    loggers = (TensorBoardLogger(tmp_path, name="a"), PlainLogger(tmp_path, name="b"))
    with limited(1_000_000), pytest.raises(NoRoom):
        TensorBoard().open(Run(layout_of("a"), "run", loggers=loggers))
    assert not [*tmp_path.rglob("events.gradwatch*")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_picture_that_cannot_be_written_leaves_the_users_writer_as_usable(tmp_path: Path) -> None:
    """Its thread ends at the first error, and would raise that at whatever is logged next."""
    logger, picture = TensorBoardLogger(tmp_path), np.zeros((4, 4, 3), dtype=np.uint8)
    logger.log_metrics({"users": 0.0}, step=0)
    logger.experiment.flush()
    here = Path(logger.log_dir)
    write = writer_for(logger)
    assert write is not None
    here.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        write(logger, "picture", picture, 0)
    (tmp_path / "away").rename(here)
    logger.log_metrics({"users": 1.0}, step=1)
    logger.finalize("success")
    assert sorted(scalars_in(here)["users"]) == [0, 1], "in two files, whose order by name is not that of time"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_file_shared_with_the_user_is_usable_after_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_space, "local_path", lambda folder: None)  # as of a remote folder
    here, away = tmp_path / "run", tmp_path / "away"
    writer = SummaryWriter(str(here))
    writer.add_scalar("users", 0.0, 0)
    writer.flush()
    sink = TensorBoard(writer=writer)
    sink.open(Run(layout_of("a"), "run"))

    def rest_of_the_fit() -> None:  # whichever call comes after the thread's error
        feed(sink, record_of(layout_of("a"), 0, [1.0]))
        sink.close(HEALTHY)

    here.rename(away)
    with pytest.raises(FileNotFoundError):
        rest_of_the_fit()
    away.rename(here)
    writer.add_scalar("users", 1.0, 1)
    writer.close()
    assert sorted(scalars_in(here)["users"]) == [0, 1]
