"""The checkpoint to go back to: the last one that was written before anything was wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

Stamp = tuple[int, int, int]

REMOTE: Stamp = (0, 0, 0)
"""Stands for the stamp of a file that is not on a disk of this machine."""

MOST_CHECKPOINTS = 256
"""Checkpoints that are remembered. Judgement: `ModelCheckpoint` keeps a few, unless `save_top_k=-1`."""


class Checkpoints:
    """The number of optimizer steps in each checkpoint file.

    A Trainer announces a save before the file is written, without its path. Of the files that checkpoint callbacks
    name, those that are new or have changed belong to the latest save.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._seen: dict[str, Stamp] = {}
        self._steps: dict[str, int] = {}

    def started_from(self, path: str, step: int) -> None:
        """The run goes on from that file, with `step` optimizer steps in it."""
        if (stamp := _stamp(path)) is not None:
            self._note(path, stamp, step)

    def save_begins(self, paths: Iterable[str], step: int) -> None:
        """A checkpoint after `step` optimizer steps is about to be written; `paths` are those named before."""
        paths = tuple(paths)
        self._look(path for path in paths if not _remote(path))
        self._step = step
        self._look(filter(_remote, paths))  # named before they are written, and not to be looked at

    def latest(self, paths: Iterable[str], unhealthy: Callable[[int], bool]) -> tuple[str, int] | None:
        """The latest file that still exists and is not `unhealthy(steps)`, and its steps; None without one."""
        self._look(paths)
        for path, step in sorted(self._steps.items(), key=lambda item: -item[1]):
            if not unhealthy(step) and _stamp(path) == self._seen[path]:
                return path, step
        return None

    def _look(self, paths: Iterable[str]) -> None:
        for path in paths:
            stamp = _stamp(path)
            if stamp is not None and self._seen.get(path) != stamp:
                self._note(path, stamp, self._step)

    def _note(self, path: str, stamp: Stamp, step: int | None) -> None:
        self._seen[path] = stamp
        self._steps.pop(path, None)
        if step is not None:
            self._steps[path] = step
        for oldest in [*self._steps][:-MOST_CHECKPOINTS]:
            del self._steps[oldest]


def _remote(path: str) -> bool:
    return "://" in path


def _stamp(path: str) -> Stamp | None:
    """Changes when the file is written again; None if there is no file."""
    if _remote(path):
        return REMOTE
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
