"""The host's side: records into the history, rules over it, findings into alerts, all of it to the sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gradwatch.alert import Alert, Finding, Latch, Severity, Verdict, rank
from gradwatch.history import History
from gradwatch.record import Floats, Layout, Missing, Run
from gradwatch.rules import Rule
from gradwatch.sinks import Sink
from gradwatch.sinks.terminal import beside_bars

logger = logging.getLogger("gradwatch")


class Diagnosis:
    """Keeps the history, runs the rules and feeds the sinks. A rule or sink that raises is dropped, once and aloud."""

    def __init__(self, rules: Sequence[Rule], sinks: Sequence[Sink], *, on_alert: Callable[[Alert], None]) -> None:
        self.history = History(Layout(()))
        self.latch = Latch()
        self.notes: list[str] = []
        self._rules = list(rules)
        self._sinks = list(sinks)
        self._on_alert = on_alert
        self._open = False
        self._recorded = 0
        self._reached: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        """Sites that got a gradient at least once."""
        self._codes: NDArray[np.int8] = np.zeros(0, dtype=np.int8)

    def open(self, run: Run) -> None:
        """Begin a run, or go on with one whose layout has grown."""
        if len(self.history):
            self.history.relayout(run.layout)
        else:
            self.history = History(run.layout)
        self._to_sinks(lambda sink: sink.open(run))
        self._open = True

    def order(self, order: tuple[int, ...]) -> None:
        """The layers' order of execution has become known."""
        self.history.relayout(replace(self.history.layout, order=order))

    def take(
        self,
        step: int,
        *,
        axis: int,
        optimizer: int,
        values: Mapping[str, Floats],
        scalars: Mapping[str, float],
        codes: NDArray[np.int8],
    ) -> None:
        """Begin a record with what was measured before the step, and judge it."""
        self.history.append(step, axis=axis, optimizer=optimizer, values=values, scalars=scalars, codes=codes)
        self._recorded += 1
        if codes is not self._codes:
            more = np.zeros(len(codes) - len(self._reached), dtype=bool)
            self._reached = np.concatenate([self._reached, more]) | (codes == int(Missing.MEASURED))
            self._codes = codes
        self._judge(step)

    def amend(self, values: Mapping[str, Floats], scalars: Mapping[str, float]) -> None:
        """Complete the record with what was measured after the step."""
        self.history.amend(values, scalars)

    def emit(self) -> None:
        """The latest record is complete: send it on."""
        if self._sinks:
            record = self.history[-1]
            self._to_sinks(lambda sink: sink.record(record))

    def close(self, overhead: float) -> None:
        """The run is over: the verdict to the sinks, once."""
        if not self._open:
            return
        self._open = False
        verdict = self.verdict(overhead)
        self._to_sinks(lambda sink: sink.close(verdict))

    def verdict(self, overhead: float) -> Verdict:
        layout = self.history.layout
        return Verdict(
            rank(self.latch.alerts), self._recorded, len(layout.layers), overhead, self._untrained(), tuple(self.notes)
        )

    def _judge(self, step: int) -> None:
        findings: dict[str, Sequence[Finding] | None] = {}
        for rule in tuple(self._rules):
            try:
                found = rule(self.history)
            except Exception as error:
                self._rules.remove(rule)
                self._drop("rule", rule.name, error)
                continue
            findings[rule.name] = found
            if found and getattr(rule, "taints", False):
                index = self.history.layout.index
                sites = [site for finding in found for site in finding.sites]
                self.history.distrust([0, *(index[site] for site in sites if site in index)])
        changes = self.latch.update(step, findings)
        for alert in changes.opened + changes.grown + changes.closed:
            self._to_sinks(partial(_tell, alert=alert))
        for alert in changes.opened:
            if alert.severity is not Severity.NOTICE:
                self._on_alert(alert)

    def _untrained(self) -> dict[str, str]:
        """Parameters that never got a gradient, with the reason of the last record."""
        if not len(self._reached):
            return {}
        layout, codes = self.history.layout, self.history.codes(1)[-1]
        executed = set(layout.order)
        reasons: dict[str, str] = {}
        for place, owner in zip(layout.parameters, layout.owners, strict=True):
            if self._reached[place]:
                continue
            code = Missing(int(codes[place]))
            reason = code.reason
            if code is Missing.NO_GRADIENT and executed:
                reason = "detached (its layer runs)" if int(owner) in executed else "unused (its layer never runs)"
            reasons[layout.sites[place].name] = reason
        return reasons

    def _to_sinks(self, send: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                send(sink)
            except Exception as error:
                self._sinks.remove(sink)
                self._drop("sink", type(sink).__name__, error)

    def _drop(self, kind: str, name: str, error: Exception) -> None:
        note = f"the {kind} {name} failed and was switched off: {type(error).__name__}: {error}"
        self.notes.append(note)
        with beside_bars(logger):
            logger.warning("GradWatch: %s", note)
        logger.debug("traceback of the %s %s", kind, name, exc_info=error)


def _tell(sink: Sink, alert: Alert) -> None:
    sink.alert(alert)
