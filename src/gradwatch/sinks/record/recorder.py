"""The record of a run on disk where it is not beside a TensorBoard logger's file: in a folder of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.arguments import check_path
from gradwatch.core.block import Block
from gradwatch.core.record import Run
from gradwatch.sinks.headline_scalars import checked_interval
from gradwatch.sinks.record.event_file import OwnEventFile
from gradwatch.sinks.record.record_writer import RecordWriter
from gradwatch.sinks.tensorboard.sink import is_summary_writer, writers_of

FOLDER = "gradwatch"
"""Beside the logs."""


class Recorder:
    """Keeps the record of a run in `folder`, `<log_dir>/gradwatch` by default.

    Where the Trainer has a TensorBoard logger, the record is in that one's folder, and nothing is written twice unless
    a `folder` is given. Without one and without a log directory, nothing is kept.

    The format is that of TensorBoard's own logs. It is what a record needs to be: written by appending alone, with the
    length and the checksum of every piece, so that a file that was cut off anywhere is good up to there; each column
    is described in the file; and nobody has to run code to read it. And it is what people have: the TensorBoard on
    their screen shows the file, their tools copy and sync it, and one reader serves the report and the command line.
    SQLite would need a journal beside it and locks that network disks do not have; Parquet and HDF5 cannot be read
    before they are closed; JSON lines take four times the room and have no number for what is not finite.
    """

    def __init__(self, *, folder: str | Path | None = None, every_n_steps: int | None = None) -> None:
        """`every_n_steps`: steps between statistics other than the gradient norm, None for the Trainer's
        `log_every_n_steps`.
        """
        expected = "the path of a folder, or None for one beside the logs"
        self.folder = None if folder is None else check_path("folder", folder, expected)
        self.every_n_steps = checked_interval(every_n_steps)
        self._file: OwnEventFile | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, is a fresh recorder with the same options: the file stays with the run."""
        return partial(Recorder, folder=self.folder, every_n_steps=self.every_n_steps), ()

    def open(self, run: Run) -> None:
        if self._file is None:
            folder = self.folder or _beside_logs(run)
            if folder is None:
                return
            self._file = OwnEventFile(folder)
            every = self.every_n_steps or run.log_every_n_steps
            self._writer = RecordWriter([self._file.events()], every)
        self._writer.open(run)

    def block(self, block: Block) -> None:
        if self._file is not None:
            self._writer.block(block)

    def alert(self, alert: Alert) -> None:
        if self._file is not None:
            self._writer.alert(alert)

    def close(self, verdict: Verdict) -> None:
        if self._file is not None:
            try:
                self._writer.close(verdict)
            finally:
                self._file.close()
                self._file = None


def _beside_logs(run: Run) -> Path | None:
    """None where there is no place, or the record is where a TensorBoard logger writes."""
    if run.log_dir is None or any(is_summary_writer(writer) for writer in writers_of(run)):
        return None
    return Path(run.log_dir) / FOLDER
