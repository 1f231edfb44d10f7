"""Finds the last healthy checkpoint, the one to go back to: written before any fault."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

Stamp = tuple[int, int, int]
"""Modification time in ns, size and inode of a file."""

REMOTE: Stamp = (0, 0, 0)
"""The stamp of every remote file."""


class Checkpoints:
    """The number of optimizer steps in each checkpoint file.

    A Trainer announces a save before the file is written, without its path. Among the paths of checkpoint callbacks,
    files that are new or have changed belong to the latest save.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._files: dict[str, tuple[Stamp, int | None]] = {}
        """Path -> its stamp and its steps, None for a file from before the first save; the latest last."""

    def started_from(self, path: str, step: int) -> None:
        """The run was resumed from that file, which has `step` optimizer steps."""
        if (stamp := _stamp(path)) is not None:
            self._files[path] = stamp, step

    def save_begins(self, paths: Iterable[str], step: int) -> None:
        """A checkpoint after `step` optimizer steps will be written; `paths`: those of the callbacks before it."""
        paths = tuple(paths)
        self._update(path for path in paths if not _remote(path))
        self._step = step
        self._update(filter(_remote, paths))  # remote paths are known before the files are written

    def latest(self, paths: Iterable[str], unhealthy: Callable[[int], bool]) -> tuple[str, int] | None:
        """The latest file that still exists and is not `unhealthy(steps)`, and its steps; None without one."""
        self._update(paths)
        known = [(path, stamp, step) for path, (stamp, step) in self._files.items() if step is not None]
        for path, stamp, step in sorted(known, key=lambda file: -file[2]):
            if not unhealthy(step) and _stamp(path) == stamp:
                return path, step
        return None

    def _update(self, paths: Iterable[str]) -> None:
        for path in paths:
            stamp, (known, _) = _stamp(path), self._files.get(path, (None, None))
            if stamp is not None and stamp != known:
                self._files.pop(path, None)
                self._files[path] = stamp, self._step


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
