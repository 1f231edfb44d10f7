"""What a recorded run says of itself: its description, the incidents of all sessions, its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradwatch.core.alert import Alert, Verdict, ranked
from gradwatch.core.block import Block
from gradwatch.core.loss_levels import LossLevels
from gradwatch.sinks.record.incident_spans import Key, Span
from gradwatch.sinks.record.run_metadata import alert_of, verdict_of

CUT_OFF = "the record has no end: the run was cut off, or is still under way"


class Outcome:
    """Collects the texts of a recorded run, and of its steps what a verdict says of them."""

    def __init__(self) -> None:
        self.meta: Mapping[str, Any] = {}
        """The `meta` of the last session, see `sinks.record.run_metadata`; empty where it was not recorded."""
        self.alerts_by_key: dict[Key, Alert] = {}
        self.spans: dict[Key, Span] = {}
        self.finished: float | None = None
        """When the last session ended, in seconds since the epoch; None where it was cut off."""
        self.began = 0.0
        """When the first session did."""
        self.notes: tuple[str, ...] = ()
        """What was wrong with the files, a sentence each."""
        self._last_verdict = Verdict((), 0, 0, 0.0, {})
        self.steps = self.layers = 0
        self._overhead = 0.0
        self._losses = LossLevels()

    def add_text(self, kind: str, fields: Mapping[str, Any]) -> None:
        """`fields`: of a text of that kind, see `sinks.record.run_metadata`."""
        if kind == "meta":  # again where a run was resumed or layers were adopted
            self.meta, self.finished = fields, None
        elif kind == "alerts":
            self._add_alerts(fields["alerts"])
        else:
            self._end(fields)

    def add_block(self, block: Block) -> None:
        self.steps += len(block)
        self.layers = len(block.layout.layers)
        self._losses.extend(block)
        overhead = block.scalars.get("overhead", np.empty(0))
        known = overhead[~np.isnan(overhead)]
        self._overhead = float(known[-1]) if len(known) else self._overhead

    def _add_alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        for fields in alerts:
            alert = alert_of(fields)
            key = alert.rule, alert.step
            begun, over = fields["axis"], fields["closed_axis"]
            if begun is None:  # an earlier session may know
                begun = self.spans.get(key, Span()).begin
            self.alerts_by_key[key], self.spans[key] = alert, Span(begun, over, fields["noticed_axis"])

    def _end(self, verdict: Mapping[str, Any]) -> None:
        last = verdict_of(verdict)
        if self.steps > last.steps and self.meta.get("started") != self.began:  # it knows nothing of sessions before
            last = replace(last, steps=self.steps, layers=self.layers, loss=self._losses.levels, run_steps=None)
        self._add_alerts(verdict["incidents"])
        self.finished, self._last_verdict = float(verdict["finished"]), last

    @property
    def verdict(self) -> Verdict:
        """The verdict of the run; without one, the incidents as last recorded."""
        alerts = ranked(self.alerts_by_key.values())
        if self.finished is None:
            notes = (CUT_OFF,)
            levels = self._losses.levels
            return Verdict(alerts, self.steps, self.layers, self._overhead, {}, notes, loss=levels, ended=False)
        return replace(self._last_verdict, incidents=alerts)

    @property
    def loss_levels(self) -> tuple[float, float] | None:
        """As `LossLevels.shown` has them."""
        return self._losses.shown(self.verdict.loss)
