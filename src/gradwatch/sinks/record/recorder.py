"""Writes the record of a run to a folder of its own, for runs without a TensorBoard logger."""

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
from gradwatch.sinks.record.record_format import FOLDER
from gradwatch.sinks.record.record_writer import RecordWriter
from gradwatch.sinks.run_summary import RunSummary
from gradwatch.sinks.summary_writers import is_summary_writer, writers_of


class Recorder:
    """Writes the record of a run to `folder`, `<log_dir>/gradwatch` by default.

    Where the Trainer has a TensorBoard logger, the TensorBoard sink writes the record to the logger's folder, and this
    sink writes nothing unless a `folder` is given. It also writes nothing without a `folder` and a log directory.

    The format is that of TensorBoard's event files: append-only, each piece with its length and checksum, so that a
    truncated file is readable up to that place, and readable without running code. TensorBoard shows the file, and
    existing tools copy it. Alternatives: SQLite needs a journal and locks, which network disks lack; Parquet and HDF5
    cannot be read before they are closed; JSON lines take four times the space and cannot hold non-finite numbers.
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
        """A copy, deep or pickled, is a new recorder with the same options and no open file."""
        return partial(Recorder, folder=self.folder, every_n_steps=self.every_n_steps), ()

    def open(self, run: Run) -> None:
        if self._file is None:
            folder = self.folder or _default_folder(run)
            if folder is None:
                return
            self._file = OwnEventFile(folder)
            every = self.every_n_steps or run.log_every_n_steps
            self._writer = RecordWriter([self._file.events()], every, run.summary or RunSummary())
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


def _default_folder(run: Run) -> Path | None:
    """None without a log directory, and where a TensorBoard logger's folder has the record."""
    if run.log_dir is None or any(map(is_summary_writer, writers_of(run))):
        return None
    return Path(run.log_dir) / FOLDER
