"""An event file that only GradWatch writes, so that a failure does not affect a file of the user."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import monotonic, time
from typing import Any

from gradwatch.core import disk_space
from gradwatch.sinks.record.event_writer import EventWriter
from gradwatch.sinks.record.tfrecord import framed

CHECK_SECONDS, CHECK_BYTES = 0.5, 2**20
"""Seconds and bytes between two checks of the free disk space, each of which is slow on a network disk. Judgement."""

_numbers = count()


class OwnEventFile:
    """An unbuffered event file: the events of a killed process remain.

    It can be in one folder with the file of a SummaryWriter: TensorBoard shows both as one run. Its name sorts before
    that file's, because TensorBoard's slow loader follows only the last file of a folder (without
    `--reload_multifile=true`), and that has to be the user's.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError where `folder` cannot be made or written to, or its disk has too little space."""
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]

        disk_space.check_disk(folder)
        self._event: Any = event_pb2.Event
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        now = time()
        name = f"events.gradwatch.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = open(folder / name, "xb", buffering=0)  # noqa: SIM115 (`close` closes it, or else its end)
        self.close = weakref.finalize(self, self._file.close)
        self._size = 0
        self._checked, self._checked_size = monotonic(), 0
        self._append(self._event(wall_time=now, file_version="brain.Event:2"))

    def add_summary(self, summary: Any, step: int | None) -> None:
        """Raises OSError where it cannot be written, and NoRoom where it may not be. None of it is written then."""
        self._append(self._event(wall_time=time(), step=step, summary=summary))

    def _append(self, event: Any) -> None:
        frame = framed(event.SerializeToString())
        disk_space.check_limit(self._size + len(frame))
        if monotonic() - self._checked >= CHECK_SECONDS or self._size - self._checked_size >= CHECK_BYTES:
            disk_space.check_disk(self.folder, len(frame))
            self._checked, self._checked_size = monotonic(), self._size
        if self._file.write(frame) != len(frame):  # an unbuffered file writes what there is room for
            with suppress(OSError):
                self._file.truncate(self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._size += len(frame)

    def events(self) -> EventWriter:
        """An EventWriter to this file."""
        return EventWriter(lambda: self, self.folder)

    def flush(self) -> None:
        """Nothing to do: the file is unbuffered."""
