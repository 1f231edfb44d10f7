"""The sink that writes the report when a fit is over."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from pathlib import Path
from time import time

import numpy as np

from gradwatch.core import disk_space
from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.arguments import check_path
from gradwatch.core.block import Block
from gradwatch.core.record import Run
from gradwatch.runs.pages import write
from gradwatch.runs.report.page import page
from gradwatch.runs.report.run_data import RunData
from gradwatch.sinks.headline_scalars import HEADLINE_GROUP
from gradwatch.sinks.logger_files import Picture, file_writer_for, writer_for
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.summary_writers import other_loggers
from gradwatch.sinks.tensorboard.heatmap_image import heatmap_of
from gradwatch.sinks.terminal.progress_bars import print_whole

NAME = "gradwatch_report.html"

HEATMAP_TAG = f"{HEADLINE_GROUP}heatmap"
"""Under which other loggers than TensorBoard's show the heatmap."""


class Report:
    """Writes `gradwatch_report.html` into `folder`, the log directory by default, and prints where it is.

    Where a file of that name exists, as of an earlier fit, the name gets a number: `gradwatch_report_2.html`. Loggers
    that take files get a copy, and those that take images the heatmap: Weights & Biases, MLflow, Comet, Neptune.
    """

    def __init__(self, *, folder: str | Path | None = None) -> None:
        expected = "the path of a folder, or None for the log directory"
        self.folder = None if folder is None else check_path("folder", folder, expected)
        self._data: RunData | None = None

    def open(self, run: Run) -> None:
        if self._data is None:
            self._data, self._began = RunData(run.summary), time()
        self._loggers = other_loggers(run)
        self._folder = self.folder or (None if run.log_dir is None else Path(run.log_dir))
        self._data.meta = run_metadata.meta_fields(run, self._began)
        self._data.summary.adopt(run.layout)

    def block(self, block: Block) -> None:
        if self._data is not None and self._folder is not None:
            self._data.block(block)

    def alert(self, alert: Alert) -> None:
        pass

    def close(self, verdict: Verdict) -> None:
        data, self._data = self._data, None
        if data is None or self._folder is None or not data.summary.steps:
            return
        data.verdict, data.spans = verdict, data.summary.positions.spans(verdict.incidents)
        data.meta = {**data.meta, "finished": time()}
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
        self._give(data, path)

    def _give(self, data: RunData, path: Path) -> None:
        """The heatmap and the report to the loggers that take images and files; a failure of one is raised last."""
        failures: list[tuple[object, Exception]] = []
        picture: tuple[Picture, int] | None = None
        if any(map(writer_for, self._loggers)) and len(data.summary.grad_norm):
            drawn, last = heatmap_of(data.summary, data.verdict)
            picture = np.asarray(drawn.convert("RGB")), last
        for logger in self._loggers:
            draw, keep = writer_for(logger), file_writer_for(logger)
            try:
                if draw is not None and picture is not None:
                    draw(logger, HEATMAP_TAG, *picture)
                if keep is not None:
                    keep(logger, path)
            except Exception as error:
                failures.append((logger, error))
        if failures:
            names = ", ".join(f"{type(logger).__name__} ({error!r})" for logger, error in failures)
            raise RuntimeError(f"could not give the heatmap and the report to {names}") from failures[0][1]


def _new_file(folder: Path) -> Path:
    """An empty file with the first unused name, which no other fit can take from then on. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / (f"{Path(NAME).stem}_{number}.html" if number > 1 else NAME)
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError("numbers do not end")
