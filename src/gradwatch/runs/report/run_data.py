"""The data of a report, collected from a running fit or from a record, in memory that does not grow with the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.core.alert import Alert, Severity, Verdict, serious
from gradwatch.core.block import Block
from gradwatch.core.loss_levels import LeadingOptimizer, ends_of, known_numbers
from gradwatch.runs.names import with_short_names
from gradwatch.runs.reader import Progress, read_run
from gradwatch.sinks.downsampling import Downsampling
from gradwatch.sinks.record.incident_spans import Key, Span
from gradwatch.sinks.run_health import status
from gradwatch.sinks.run_summary import RunSummary


class RunData:
    """Collects blocks, and at the end the alerts."""

    def __init__(self, summary: RunSummary | None = None) -> None:
        """`summary`: the one that the sinks of the run have in common, if they have."""
        self.meta: dict[str, Any] = {}
        self.verdict = Verdict((), 0, 0, 0.0, {})
        self.spans: Mapping[Key, Span] = {}
        self.notes: tuple[str, ...] = ()
        self.summary = summary or RunSummary()
        self.loss = Downsampling(1, log=False)
        self._leading = LeadingOptimizer()
        self.loss_levels: tuple[float, float] | None = None
        """Of a recorded run, as `LossLevels.shown` has them."""
        self.rates: tuple[float, float, float] | None = None
        """The first learning rate, the highest and the last."""

    def block(self, block: Block) -> None:
        self.summary.block(block)
        leading = self._leading.rows(block.optimizers)
        rates, known = known_numbers("lr", block.scalars, len(block.steps))
        self.rates = ends_of(np.concatenate([self.rates or (), rates[leading & known]]))
        loss, known = known_numbers("loss", block.scalars, len(block.steps))
        known &= leading
        if known.any():
            self.loss.extend(
                block.axis[known], loss[known, None], np.ones((np.count_nonzero(known), 1), dtype=np.bool_)
            )

    @property
    def serious(self) -> list[Alert]:
        """The warnings and errors, worst first, with names of a readable length."""
        return [with_short_names(alert) for alert in serious(self.verdict.incidents)]

    @property
    def status(self) -> str:
        """The run in one line."""
        return status(replace(self.verdict, incidents=(*self.serious,)))

    @property
    def unhealthy(self) -> dict[int, Severity]:
        """Place of a layer -> the worst severity of the warnings and errors about it, the worst first."""
        faults = self.summary.faults_by_row(self.verdict)
        worst = {row - 1: found[0].severity for row, found in faults.items() if row}
        serious = [place for place, severity in worst.items() if severity is not Severity.NOTICE]
        return {place: worst[place] for place in sorted(serious, key=lambda place: -worst[place].order)}

    def begin(self, alert: Alert) -> int | None:
        """Where an alert of the verdict begins on the x-axis; None where that is not known."""
        return self.spans.get(alert.key, Span(alert.step)).begin


def read_run_data(path: Path, *, progress: Progress | None = None) -> RunData:
    """The data of the recorded run at `path`. Arguments and errors: as of `read_run`."""
    data = RunData()
    outcome = read_run(path, data.block, progress=progress)
    data.verdict, data.spans = outcome.verdict, outcome.spans
    data.meta, data.notes, data.loss_levels = dict(outcome.meta), outcome.notes, outcome.loss_levels
    if outcome.finished is not None and outcome.meta.get("started") == outcome.began:  # it was not resumed
        data.meta["finished"] = outcome.finished
    data.meta["started"] = outcome.began
    return data
