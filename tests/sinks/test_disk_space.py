"""What GradWatch writes ends no logging of the user's: under a limit on the size of files, and on a disk that fills."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from by_hand import HEALTHY, layout_of, record_of
from gradwatch.runs.run_record import read

from gradwatch import bundle, room
from gradwatch.core.disk_space import RESERVE
from gradwatch.core.record import Run
from gradwatch.runs.report.sink import Report
from gradwatch.sinks.record.recorder import Recorder


@contextmanager
def limited(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A disk that says what is set here."""
    disk = SimpleNamespace(free=10 * RESERVE, total=100 * RESERVE)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: disk)
    return disk


def test_a_checkpoint_is_held_only_where_there_is_room_for_the_next_ones(tmp_path: Path, disk: Any) -> None:
    saved, beside = tmp_path / "a.ckpt", tmp_path / "incident.pt"
    saved.write_bytes(bytes(1000))
    disk.free = RESERVE + 1999
    assert bundle.hold(str(saved), beside) == str(saved)
    assert not beside.with_suffix(".ckpt").exists()
    disk.free = RESERVE + 2000
    assert bundle.hold(str(saved), beside) == str(beside.with_suffix(".ckpt"))


def test_a_page_that_cannot_be_written_leaves_no_half_of_itself(tmp_path: Path, monkeypatch: Any) -> None:
    sink, layout = Report(folder=tmp_path), layout_of("a")
    sink.open(Run(layout, "run"))
    sink.record(record_of(layout, 0, [1.0]))
    monkeypatch.setattr(room, "largest", lambda: None)  # as with a quota, of which nobody tells
    with limited(1000), pytest.raises(OSError, match="File too large"):
        sink.close(HEALTHY)
    assert not list(tmp_path.iterdir())


def test_where_a_write_fails_the_record_ends_with_a_whole_event(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "largest", lambda: None)
    sink, layout = Recorder(folder=tmp_path, every_n_steps=1), layout_of("a", "b")
    sink.open(Run(layout, "run"))
    records = [record_of(layout, step, [1.0, 2.0]) for step in range(100)]
    with limited(9_000), pytest.raises(OSError, match="No space left on device"):
        [sink.record(record) for record in records]
    run = read(tmp_path)
    assert 20 < len(run.values["grad_norm"].steps) < 100
    assert not run.notes, "nothing is torn"
