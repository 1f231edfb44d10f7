"""What a recorded run says of itself: its description, the incidents of all sessions, its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gradwatch.core.alert import CLOSE_AFTER, Alert, Verdict, ranked
from gradwatch.core.block import Block
from gradwatch.core.loss_levels import LossLevels
from gradwatch.sinks.record.incident_spans import Key, Span

CUT_OFF = "the record has no end: the run was cut off, or is still under way"


def end_of(began: float, sessions: Mapping[float, int]) -> float:
    """The step at which a session that began then ends: the first one, least of several, of those that began later.

    `sessions`: when each began -> its first step. Infinite without a later one.
    """
    return min((step for later, step in sessions.items() if later > began), default=np.inf)


class Outcome:
    """Collects the texts of a recorded run, oldest first, and of its steps what a verdict says of them."""

    def __init__(self) -> None:
        self.meta: Mapping[str, Any] = {}
        """The `meta` of the last session, see `sinks.record.run_metadata`; empty where it was not recorded."""
        self.alerts: dict[Key, Alert] = {}
        """As they last stood."""
        self._ends: dict[Key, float] = {}
        """The step at which the session ends that last reported the incident."""
        self.spans: dict[Key, Span] = {}
        self.finished: float | None = None
        """When the last session ended, in seconds since the epoch; None where it was cut off."""
        self.began = 0.0
        """When the first session did that is not wholly superseded, in seconds since the epoch."""
        self.notes: tuple[str, ...] = ()
        """What was wrong with the files, a sentence each."""
        self.steps = self.layers = 0
        self.extent: tuple[int, int] | None = None
        """The first and the last of the steps."""
        self.losses = LossLevels()
        self._last_verdict = Verdict((), 0, 0, 0.0, {})
        self._overhead = 0.0

    def add_text(self, kind: str, fields: Mapping[str, Any], *, end: float = np.inf) -> None:
        """`fields`: as `run_metadata.read_text` has those of that kind. Alerts noticed from the step `end` on are
        left out: a later session has it. Those of an earlier session that a later one ends without are over.
        """
        if kind == "meta":  # again where a run was resumed or layers were adopted
            self.meta, self.finished = fields, None
            return
        if kind == "verdict":
            self.finished, self._last_verdict = fields["finished"], fields["verdict"]
        for alert, span in fields["alerts"]:
            if alert.noticed < end:
                if span.begin is None:  # an earlier session may know
                    span = span._replace(begin=self.spans.get(alert.key, span).begin)
                self.alerts[alert.key], self.spans[alert.key], self._ends[alert.key] = alert, span, end
        if kind == "verdict" and self._last_verdict.steps >= CLOSE_AFTER:
            known = {alert.key for alert, _ in fields["alerts"]}
            for key, alert in self.alerts.items():
                last = self._ends[key] - 1
                if alert.closed_step is None and key not in known and last < np.inf:
                    self.alerts[key] = replace(alert, closed_step=int(last))

    def add_block(self, block: Block) -> None:
        self.steps += len(block.steps)
        self.extent = (self.extent or (int(block.steps[0]), 0))[0], int(block.steps[-1])
        self.layers = len(block.layout.layers)
        self.losses.add(block.scalars, block.optimizers)
        overhead = block.scalars.get("overhead", np.empty(0))
        known = overhead[~np.isnan(overhead)]
        self._overhead = float(known[-1]) if len(known) else self._overhead

    @property
    def verdict(self) -> Verdict:
        """The verdict of the run; without one, the incidents as last recorded."""
        alerts, steps, layers, levels = ranked(self.alerts.values()), self.steps, self.layers, self.losses.levels
        first, end = self.extent or (0, 0)
        run_steps = end - first + 1 if end - first + 1 > steps else None
        if self.finished is None:
            known = Verdict(alerts, steps, layers, self._overhead, {}, (CUT_OFF,), ended=False)
        elif steps > self._last_verdict.steps:  # it knows nothing of the sessions before
            known = replace(self._last_verdict, incidents=alerts, steps=steps, layers=layers)
        else:
            return replace(self._last_verdict, incidents=alerts)
        return replace(known, loss=levels, run_steps=run_steps)

    @property
    def loss_levels(self) -> tuple[float, float] | None:
        """As `LossLevels.shown` has them."""
        return self.losses.shown(self.verdict.loss)
