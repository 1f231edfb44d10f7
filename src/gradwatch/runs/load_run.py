"""A recorded run for a notebook: its verdict, its numbers as arrays and as frames."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gradwatch.runs.arrays import RunArrays, read


def load_run(path: str | Path, *, statistics: Collection[str] | None = None) -> RunArrays:
    """The run at `path`, a log directory or an event file, also of one that crashed or is still under way.

    `statistics`: the names of those that are read, None for all. A run of more than 20,000 steps is thinned evenly.
    Raises `gradwatch.runs.files.Unreadable` where there is no run, or more than one.
    """
    return read(path, statistics=statistics)
