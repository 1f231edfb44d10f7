"""A recorded run for a notebook: its verdict, its numbers as arrays and as frames."""

from __future__ import annotations

import os
from collections.abc import Collection

from gradwatch.core.arguments import check_items, check_path, wrong
from gradwatch.runs.arrays import RunArrays, read


def load_run(path: str | os.PathLike[str], *, statistics: Collection[str] | None = None) -> RunArrays:
    """Read the run at `path`, a log directory or an event file, even one that crashed or is still running.

    `statistics`: the names of those to read, None for all. A run of more than 20,000 steps is thinned evenly.
    Raises ValueError if there is no run at `path`, more than one, or one that cannot be read.
    """
    checked = check_path("load_run: path", path, "the path of a log directory or an event file")
    if statistics is None:
        return read(checked)
    expected = 'names of statistics, such as ("grad_norm", "weight_norm"), or None for all'
    names = check_items("load_run: statistics", statistics, expected)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(wrong("load_run: statistics", statistics, expected))
    return read(checked, statistics=names)
