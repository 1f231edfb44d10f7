"""An event file of our own: nothing that fails in it touches a file of the user's."""

from __future__ import annotations

import errno
import os
import socket
import time
import weakref
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from gradwatch.core import disk_space
from gradwatch.sinks.record.event_writer import EventWriter
from gradwatch.sinks.record.tfrecord import framed

SECONDS, BYTES = 0.5, 2**20
"""After which, and after how many bytes, it is asked again what is free on the disk: on a network's disk that is a
question to another machine. Judgement."""

_numbers = count()


class OwnEventFile:
    """Has every event as soon as it is written: what a killed process wrote stays.

    It can stand beside a SummaryWriter's file in one folder, and TensorBoard shows both as one run. Its name comes
    before that one's by the alphabet: TensorBoard's slower loader reads only the last file of a folder as it grows
    (unless it is told `--reload_multifile=true`), and that has to be the user's.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError where `folder` cannot be made or written to, or has no room."""
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]

        disk_space.check_disk(folder)
        self._event: Any = event_pb2.Event
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.gradwatch.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = open(folder / name, "xb", buffering=0)  # noqa: SIM115 (`close` closes it, or else its end)
        self.close = weakref.finalize(self, self._file.close)
        self._size = 0
        self._asked, self._asked_at = time.monotonic(), 0
        self._append(self._event(wall_time=now, file_version="brain.Event:2"))

    def add_summary(self, summary: Any, step: int | None = None) -> None:
        """Raises OSError where not all of it can be written, NoRoom where it is not to be: then none of it is."""
        self._append(self._event(wall_time=time.time(), step=step, summary=summary))

    def _append(self, event: Any) -> None:
        frame = framed(event.SerializeToString())
        disk_space.check_limit(self._size + len(frame))
        if time.monotonic() - self._asked >= SECONDS or self._size - self._asked_at >= BYTES:
            disk_space.check_disk(self._folder, len(frame))
            self._asked, self._asked_at = time.monotonic(), self._size
        if self._file.write(frame) != len(frame):  # an unbuffered file writes what there is room for
            with suppress(OSError):
                self._file.truncate(self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)
        self._size += len(frame)

    def events(self) -> EventWriter:
        """What writes to it."""
        return EventWriter(lambda: self, self._folder)

    def flush(self) -> None:
        """Nothing waits."""
