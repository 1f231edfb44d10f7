"""Which of a run's checkpoints to go back to: the last one that was written before anything was wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

Stamp = tuple[int, int, int]

REMOTE: Stamp = (0, 0, 0)
"""Stands for the stamp of a file that is not on a disk of this machine."""

KEPT = 256
"""Checkpoints that are remembered. Judgement: `ModelCheckpoint` keeps a few, unless it is told to keep all."""


class Checkpoints:
    """Knows of each checkpoint file how many optimizer steps are in it, though a Trainer tells of a save before it is
    written and nobody where: of the files that savers name, those that are new or other than before belong to the
    latest save.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._seen: dict[str, Stamp] = {}
        self._steps: dict[str, int] = {}

    def started_from(self, path: str, step: int) -> None:
        """The run goes on from that file, with `step` optimizer steps in it."""
        if (stamp := _stamp(path)) is not None:
            self._note(path, stamp, step)

    def saving(self, paths: Iterable[str], step: int) -> None:
        """Savers that have named `paths` so far are about to write what has come of `step` optimizer steps."""
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
        for oldest in [*self._steps][:-KEPT]:
            del self._steps[oldest]


def _remote(path: str) -> bool:
    return "://" in path


def _stamp(path: str) -> Stamp | None:
    """What changes when the file is written anew; None where there is none."""
    if _remote(path):
        return REMOTE
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
