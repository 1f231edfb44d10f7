"""Finds the last healthy checkpoint, the one to go back to: written before any fault."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

Stamp = tuple[int, int, int]
"""Modification time in ns, size and inode of a file."""

REMOTE: Stamp = (0, 0, 0)
"""The stamp of every remote file."""

MAX_CHECKPOINTS = 256
"""Checkpoints that are remembered. Judgement: `ModelCheckpoint` keeps a few, unless `save_top_k=-1`."""


class Checkpoints:
    """The number of optimizer steps in each checkpoint file.

    A Trainer announces a save before the file is written, without its path. Among the paths of checkpoint callbacks,
    files that are new or have changed belong to the latest save.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._stamps: dict[str, Stamp] = {}
        self._steps: dict[str, int] = {}

    def started_from(self, path: str, step: int) -> None:
        """The run was resumed from that file, which has `step` optimizer steps."""
        if (stamp := _stamp(path)) is not None:
            self._add(path, stamp, step)

    def save_begins(self, paths: Iterable[str], step: int) -> None:
        """A checkpoint after `step` optimizer steps will be written; `paths`: those of the callbacks before it."""
        paths = tuple(paths)
        self._update(path for path in paths if not _remote(path))
        self._step = step
        self._update(filter(_remote, paths))  # remote paths are known before the files are written

    def latest(self, paths: Iterable[str], unhealthy: Callable[[int], bool]) -> tuple[str, int] | None:
        """The latest file that still exists and is not `unhealthy(steps)`, and its steps; None without one."""
        self._update(paths)
        for path, step in sorted(self._steps.items(), key=lambda item: -item[1]):
            if not unhealthy(step) and _stamp(path) == self._stamps[path]:
                return path, step
        return None

    def _update(self, paths: Iterable[str]) -> None:
        for path in paths:
            stamp = _stamp(path)
            if stamp is not None and self._stamps.get(path) != stamp:
                self._add(path, stamp, self._step)

    def _add(self, path: str, stamp: Stamp, step: int | None) -> None:
        self._stamps[path] = stamp
        self._steps.pop(path, None)
        if step is not None:
            self._steps[path] = step
        for oldest in [*self._steps][:-MAX_CHECKPOINTS]:
            del self._steps[oldest]


def _remote(path: str) -> bool:
    return "://" in path


def _stamp(path: str) -> Stamp | None:
    """A value that changes when the file is written; None if there is no file."""
    if _remote(path):
        return REMOTE
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
