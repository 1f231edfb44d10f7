"""The checkpoint to go back to: from before anything was wrong, still there, and still the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwatch.lightning.healthy_checkpoints import Checkpoints


def fine(steps: int) -> bool:
    return False


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Checkpoints, list[str]]:
    """Three saves, to files of their own and to one that each replaces."""
    known, paths = Checkpoints(), [str(tmp_path / name) for name in ("10", "20", "30", "last")]
    for steps, path in zip((10, 20, 30), paths, strict=False):
        for file in (path, paths[3]):
            known.save_begins(paths, steps)
            Path(file).write_text(f"{file} {steps}")
    return known, paths


def test_it_is_the_last_before_the_incident(saved: tuple[Checkpoints, list[str]]) -> None:
    known, paths = saved
    assert known.latest(paths, fine) == (paths[2], 30)
    assert known.latest(paths, lambda steps: steps > 25) == (paths[1], 20)
    assert known.latest(paths, lambda steps: steps > 5) is None


def test_a_file_that_is_gone_or_another_is_not_pointed_at(saved: tuple[Checkpoints, list[str]]) -> None:
    known, paths = saved
    known.latest(paths, fine)
    Path(paths[2]).unlink()
    assert known.latest(paths, fine) == (paths[3], 30)
    Path(paths[3]).write_text("of somebody else, who did not say so, " * 3)
    known.save_begins([], 99)
    assert known.latest([], fine) == (paths[1], 20)


def test_files_from_before_the_run_are_no_ones(tmp_path: Path) -> None:
    old, known = tmp_path / "old", Checkpoints()
    old.write_text("of a run before")
    known.save_begins([str(old)], 10)
    assert known.latest([str(old)], fine) is None
    old.write_text("and now of this run")
    assert known.latest([str(old)], fine) == (str(old), 10)


def test_a_run_that_goes_on_can_go_back_to_where_it_began(tmp_path: Path) -> None:
    path, known = tmp_path / "begin", Checkpoints()
    known.started_from(str(path), 7)
    assert known.latest([], fine) is None, "it is not there"
    path.write_text("weights")
    known.started_from(str(path), 7)
    assert known.latest([], fine) == (str(path), 7)


def test_remote_files_belong_to_the_save_before_which_they_were_named() -> None:
    known = Checkpoints()
    known.save_begins(["s3://bucket/a"], 10)
    known.save_begins(["s3://bucket/a", "s3://bucket/b"], 20)
    assert known.latest([], fine) == ("s3://bucket/b", 20)
    assert known.latest([], lambda steps: steps > 10) == ("s3://bucket/a", 10)
