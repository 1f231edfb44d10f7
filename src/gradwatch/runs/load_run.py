"""A recorded run for a notebook: its verdict, its numbers as arrays and as frames."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gradwatch.runs.arrays import RunArrays, read


def load_run(path: str | Path, *, statistics: Collection[str] | None = None) -> RunArrays:
    """Read the run at `path`, a log directory or an event file, even one that crashed or is still running.

    `statistics`: the names of those to read, None for all. A run of more than 20,000 steps is thinned evenly.
    Raises `gradwatch.runs.files.Unreadable` if there is no run at `path`, or more than one.
    """
    return read(path, statistics=statistics)
