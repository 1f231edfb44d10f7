"""The record of a run on disk where no TensorBoard logger keeps it: an event file of our own."""

from __future__ import annotations

import errno
import os
import socket
import time
import weakref
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.record import Record, Run
from gradwatch.sinks.headline_scalars import checked_interval
from gradwatch.sinks.record.event_writer import EventWriter
from gradwatch.sinks.record.record_writer import RecordWriter
from gradwatch.sinks.record.tfrecord import framed
from gradwatch.sinks.tensorboard.sink import is_summary_writer, writers_of

FOLDER = "gradwatch"
"""Beside the logs."""

_numbers = count()


class Recorder:
    """Keeps the record of a run in `folder`, `<log_dir>/gradwatch` by default.

    Where the Trainer has a TensorBoard logger, the record is in that one's file, and nothing is written twice unless a
    `folder` is given. Without one and without a log directory, nothing is kept.

    The format is that of TensorBoard's own logs. It is what a record needs to be: written by appending alone, with the
    length and the checksum of every piece, so that a file that was cut off anywhere is good up to there; each column
    is described in the file; and nobody has to run code to read it. And it is what people have: the TensorBoard on
    their screen shows the file, their tools copy and sync it, and one reader serves the report and the command line.
    SQLite would need a journal beside it and locks that network disks do not have; Parquet and HDF5 cannot be read
    before they are closed; JSON lines take four times the room and have no number for what is not finite.
    """

    patient: ClassVar[bool] = True

    def __init__(self, *, folder: str | Path | None = None, every_n_steps: int | None = None) -> None:
        """`every_n_steps`: steps between statistics other than the gradient norm, None for the Trainer's
        `log_every_n_steps`.
        """
        if folder is not None and not isinstance(folder, str | Path):
            raise TypeError(f"folder={folder!r}: give a folder's path, or None for one beside the logs")
        self.folder = None if folder is None else Path(folder)
        self.every_n_steps = checked_interval(every_n_steps)
        self._file: OwnFile | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, is a fresh recorder with the same options: the file stays with the run."""
        return partial(Recorder, folder=self.folder, every_n_steps=self.every_n_steps), ()

    def open(self, run: Run) -> None:
        if self._file is None:
            folder = self.folder or _beside_logs(run)
            if folder is None:
                return
            self._file = OwnFile(folder)
            every = self.every_n_steps or run.log_every_n_steps
            self._journal = RecordWriter([EventWriter(self._file, file_of=lambda file: file)], every)
        self._journal.open(run)

    def record(self, record: Record) -> None:
        if self._file is not None:
            self._journal.record(record, self._journal.due(record), {})

    def alert(self, alert: Alert) -> None:
        if self._file is not None:
            self._journal.alert(alert)

    def close(self, verdict: Verdict) -> None:
        if self._file is not None:
            try:
                self._journal.close(verdict)
            finally:
                self._file.close()
                self._file = None


class OwnFile:
    """An event file that has every event as soon as it is written: what a killed process wrote stays."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where `folder` cannot be made or written to."""
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]

        self._event: Any = event_pb2.Event
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}.gradwatch"
        self._file = open(folder / name, "xb", buffering=0)  # noqa: SIM115 (`close` closes it, or else its end)
        self.close = weakref.finalize(self, self._file.close)
        self._append(self._event(wall_time=now, file_version="brain.Event:2"))

    def add_summary(self, summary: Any, step: int) -> None:
        """Raises OSError where not all of it can be written."""
        self._append(self._event(wall_time=time.time(), step=step, summary=summary))

    def _append(self, event: Any) -> None:
        frame = framed(event.SerializeToString())
        if self._file.write(frame) != len(frame):  # an unbuffered file writes what there is room for
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)

    def flush(self) -> None:
        """Nothing waits."""


def _beside_logs(run: Run) -> Path | None:
    """None where there is no place, or the record is in a TensorBoard logger's file."""
    if run.log_dir is None or any(is_summary_writer(writer) for writer in writers_of(run)):
        return None
    return Path(run.log_dir) / FOLDER
