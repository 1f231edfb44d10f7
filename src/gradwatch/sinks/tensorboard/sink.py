"""Writes headline scalars, the record, the text of the verdict and the built-in tabs' content for TensorBoard."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from gradwatch.core import disk_space
from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.arguments import attribute, check_flag, check_whole, wrong
from gradwatch.core.block import Block
from gradwatch.core.record import Run
from gradwatch.sinks.headline_scalars import HEADLINE_GROUP, DueHeadlines, checked_interval
from gradwatch.sinks.record.event_file import OwnEventFile
from gradwatch.sinks.record.event_writer import EventWriter
from gradwatch.sinks.record.record_writer import RecordWriter
from gradwatch.sinks.run_health import under_way
from gradwatch.sinks.run_summary import RunSummary
from gradwatch.sinks.summary_writers import file_writer_of, is_summary_writer, writers_of
from gradwatch.sinks.tensorboard.builtin_tabs import BuiltinTabs
from gradwatch.sinks.tensorboard.verdict_markdown import tab_address, verdict_markdown
from gradwatch.sinks.terminal.progress_bars import print_whole


class ScalarWriter(Protocol):
    """An object to which scalars can be written."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...


class TensorBoard:
    """Writes to the folders of the Trainer's TensorBoard loggers, or of `writer`.

    It writes to a file of its own beside theirs, so that a failure of its file (a full disk, a file size limit) does
    not affect theirs; TensorBoard shows both as one run. In a remote log directory it writes to their file.

    It writes the gradient norms of every step; headline scalars every `every_n_steps` steps of an optimizer (None: the
    Trainer's `log_every_n_steps`), each as last measured since the previous logged step; a text that says whether the
    run is healthy; and heatmaps at growing distances. When the run ends it prints how to open the GradWatch tab.

    More of TensorBoard's own tabs are filled on demand. `per_layer`: the number of layers that also get scalars of
    their own, at equal distances from the first to the last. `charts`: whether headlines are arranged in Custom
    Scalars. `histograms`: whether Distributions and Histograms show how the layers' norms are spread. A `writer` other
    than torch's SummaryWriter gets the scalars only.
    """

    def __init__(
        self,
        *,
        writer: ScalarWriter | None = None,
        every_n_steps: int | None = None,
        per_layer: int = 0,
        charts: bool = False,
        histograms: bool = False,
    ) -> None:
        if writer is not None and (isinstance(writer, type) or not callable(attribute(writer, "add_scalar"))):
            expected = (
                "a SummaryWriter (a TensorBoardLogger's `.experiment`), another object with add_scalar(tag, value, "
                "step), or None for the Trainer's own loggers"
            )
            raise TypeError(wrong("writer", writer, expected))
        self.writer = writer
        self.every_n_steps = checked_interval(every_n_steps)
        expected = "the number of layers with charts of their own such as 20, 0 for none"
        self.per_layer = check_whole("per_layer", per_layer, expected, least=0)
        self.charts, self.histograms = check_flag("charts", charts), check_flag("histograms", histograms)
        self._run: Run | None = None
        self._own: list[OwnEventFile] = []
        self._files: list[EventWriter] = []
        self._plain: list[ScalarWriter] = []
        self._axis, self._said = 0, False
        """`_said`: whether the run has a text."""
        self._tabs: BuiltinTabs | None = None
        self._due: dict[int, DueHeadlines] = {}
        """Optimizer -> its headlines."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, is a new sink with the same options and no open file."""
        own = partial(TensorBoard, writer=self.writer, every_n_steps=self.every_n_steps)
        return partial(own, per_layer=self.per_layer, charts=self.charts, histograms=self.histograms), ()

    def open(self, run: Run) -> None:
        if self._run is None:
            self._begin(run)
        self._run = run
        self._record.open(run)

    def block(self, block: Block) -> None:
        if self._run is None or not (self._files or self._plain):
            return
        self._axis = int(block.axis[-1])
        alerts, due = [*self._record.alerts.values()], dict[int, dict[str, float]]()
        optimizers = set(block.optimizers.tolist())
        for number in sorted(optimizers):
            own = self._due.setdefault(number, DueHeadlines(self._every_n_steps))
            due |= own.extend(block, alerts, number if len(optimizers) > 1 else None)
        self._record.block(block)  # first: there may be space for it and none for images
        lines = self._tabs.block(block, sorted(due), alerts) if self._tabs else {}
        if not self._said:
            self._write_text(under_way(alerts))
        for row, headline in sorted(due.items()):
            axis = int(block.axis[row])
            for writer in self._plain:
                for tag, number in headline.items():
                    writer.add_scalar(tag, number, axis)
            for file in self._files:
                file.scalars(headline | lines.get(row, {}), axis)

    def alert(self, alert: Alert) -> None:
        self._write_text(under_way((self._record.alerts | {alert.key: alert}).values()))
        self._record.alert(alert)

    def close(self, verdict: Verdict) -> None:
        if self._run is None:
            return
        alerts = self._record.alerts | {alert.key: alert for alert in verdict.incidents}
        known = replace(verdict, incidents=(*alerts.values(),))
        try:
            if self._said or known.incidents:
                self._write_text(known)
            if self._tabs:
                self._tabs.close(known)
            self._record.close(verdict)
            if self._said:
                self._say_where()
        finally:
            self._run = None
            for file in self._own:
                file.close()

    def _begin(self, run: Run) -> None:
        """Open a file beside that of each SummaryWriter."""
        self._own, self._files, self._plain = [], [], []
        shared: list[Any] = []
        writers: list[Any] = writers_of(run) if self.writer is None else [self.writer]
        if not all(map(is_summary_writer, writers)):
            disk_space.check_user_files(None)
        for writer in writers:
            if not is_summary_writer(writer):
                self._plain.append(writer)
            elif (folder := disk_space.local_path(str(writer.log_dir))) is None:
                shared.append(writer)
                self._files.append(EventWriter(partial(file_writer_of, writer), writer.log_dir, shared))
            else:
                self._own.append(OwnEventFile(Path(folder)))
                self._files.append(self._own[-1].events())
        self._said, self._due, self._tabs = False, {}, None
        self._every_n_steps = self.every_n_steps or run.log_every_n_steps
        summary = run.summary or RunSummary()
        self._record = RecordWriter(self._files, self._every_n_steps, summary)
        if self._files:
            shown = self.per_layer, self.charts, self.histograms
            self._tabs = BuiltinTabs(self._files, run.layout, summary, *shown)

    def _write_text(self, verdict: Verdict) -> None:
        """Write the whole text each time, because TensorBoard shows the latest of a tag."""
        self._said = True
        for file in self._files:
            file.text(f"{HEADLINE_GROUP}verdict", verdict_markdown(verdict, file.folder), self._axis)

    def _say_where(self) -> None:
        for file in self._own:
            folder = file.folder
            print_whole(f"GradWatch tab: tensorboard --logdir {quote(str(folder.parent))}\n  {tab_address(folder)}\n")
