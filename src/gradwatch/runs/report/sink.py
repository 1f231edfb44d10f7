"""The sink that writes the report when a fit is over."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from gradwatch.core import disk_space
from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.arguments import check_path
from gradwatch.core.block import Block
from gradwatch.core.record import Run
from gradwatch.runs.pages import write
from gradwatch.runs.report.page import page
from gradwatch.runs.report.run_data import RunData
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.incident_spans import IncidentSpans
from gradwatch.sinks.terminal.progress_bars import print_whole

NAME = "gradwatch_report.html"


class Report:
    """Writes `gradwatch_report.html` into `folder`, the log directory by default, and prints where it is.

    Where a file of that name exists, as of an earlier fit, the name gets a number: `gradwatch_report_2.html`.
    """

    def __init__(self, *, folder: str | Path | None = None) -> None:
        expected = "the path of a folder, or None for the log directory"
        self.folder = None if folder is None else check_path("folder", folder, expected)
        self._data: RunData | None = None

    def open(self, run: Run) -> None:
        if self._data is None:
            self._data, self._incidents, self._began = RunData(), IncidentSpans(), time.time()
        self._folder = self.folder or (None if run.log_dir is None else Path(run.log_dir))
        self._data.meta = json.loads(run_metadata.meta_text(run, self._began))
        self._data.summary.adopt(run.layout)

    def block(self, block: Block) -> None:
        if self._data is not None and self._folder is not None:
            self._data.block(block)
            self._incidents.extend(block.steps, block.axis)

    def alert(self, alert: Alert) -> None:
        if self._data is not None:
            self._incidents.update(alert)

    def close(self, verdict: Verdict) -> None:
        data, self._data = self._data, None
        if data is None or self._folder is None or not data.steps:
            return
        self._incidents.finish(verdict.incidents)
        data.end(verdict, self._incidents.spans)
        data.meta = {**data.meta, "finished": time.time()}
        html = page(data, source=str(self._folder))
        size = len(html.encode())
        disk_space.check_limit(size)
        disk_space.check_disk(self._folder, size)
        path = _new_file(self._folder)
        try:
            write(path, html)
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        print_whole(f"GradWatch report: {path}\n")


def _new_file(folder: Path) -> Path:
    """An empty file with the first unused name, which no other fit can take from then on. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / (f"{Path(NAME).stem}_{number}.html" if number > 1 else NAME)
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("numbers do not end")
