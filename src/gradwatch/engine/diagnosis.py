"""The work on the host: it adds records to the history, runs the rules, and sends records and alerts to the sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert, Finding, Severity, Verdict, ranked
from gradwatch.core.history import History, NonfiniteOrigin
from gradwatch.core.layer_graph import Edge, merge_edges, topological_order
from gradwatch.core.record import Floats, Layout, Missing, Run
from gradwatch.core.statistics import CATALOGUE
from gradwatch.engine.history_state import packed, unpacked
from gradwatch.rules import Rule
from gradwatch.rules.incidents import IncidentChanges, IncidentTracker
from gradwatch.sinks import Sink
from gradwatch.sinks.dispatcher import Dispatcher
from gradwatch.sinks.flight_recorder import FlightRecorder
from gradwatch.sinks.terminal.progress_bars import preserve_bars

logger = logging.getLogger("gradwatch")

STATE_VERSION = 1
"""Version of the format of `Diagnosis.state_dict()`; raised when an older GradWatch could not read a new state."""


class Diagnosis:
    """Keeps the history, runs the rules and feeds the sinks. A rule or sink that raises is dropped, with a warning."""

    def __init__(
        self,
        rules: Sequence[Rule],
        sinks: Sequence[Sink],
        *,
        on_alert: Callable[[Alert], None],
        trace: Callable[[], NonfiniteOrigin | None] = lambda: None,
    ) -> None:
        """`trace`: runs the batch of the latest record again, when a rule with `replays_batch` opens an incident."""
        self.history = History(Layout(()))
        self.incidents = IncidentTracker()
        self.notes: list[str] = []
        self.intervention_summaries: Callable[[], tuple[str, ...]] = tuple
        """The lines about interventions in the verdict."""
        self.on_incidents: Callable[[Sequence[Alert], Sequence[Alert], int], None] | None = None
        """Called when the rules have judged a step, with the open incidents of this fit, those that were already open
        in a checkpoint, and the step."""
        self._rules = list(rules)
        # a rule that reads only sampled statistics is not run at the steps between samples
        needs = {rule.name: tuple(getattr(rule, "needs", ())) for rule in rules}
        self._awaits = {name: some if all(CATALOGUE[s].sampled for s in some) else () for name, some in needs.items()}
        self.outbox = Dispatcher(sinks, dropped=partial(self.drop, "sink"))
        self._on_alert, self._trace = on_alert, trace
        self._open = False
        self._recorded = 0
        self._reached: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        """Sites that got a gradient at least once."""
        self._codes: NDArray[np.int8] = np.zeros(0, dtype=np.int8)
        self._waiting: Mapping[str, Any] | None = None
        """A state that was loaded before its run was opened."""
        self._inherited: frozenset[tuple[str, int]] = frozenset()
        """Incidents from a loaded state, by rule and step; they were reported before the run was interrupted."""

    def open(self, run: Run) -> None:
        """Begin a run, or go on with one whose layout has grown.

        Raises ValueError where a state was loaded before that does not fit it; the run is open all the same.
        """
        if len(self.history):
            known = self.history.layout
            more = replace(run.layout, order=known.order, edges=known.edges) if known.order else run.layout
            self.history.relayout(more)
        else:
            self.history = History(run.layout)
        self.outbox.open(run)
        self._open = True
        state, self._waiting = self._waiting, None
        if state is not None:
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to raise the alerts of an uninterrupted one: tensors, numbers and text.

        Rules and sinks that were dropped are not in it: a resumed run uses them again.
        """
        sites = self.history.layout.sites
        return {
            "version": STATE_VERSION,
            "history": packed(self.history.state_dict()),
            "latch": self.incidents.state_dict(),
            "recorded": self._recorded,
            "reached": [sites[place].name for place in np.flatnonzero(self._reached)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: at once if the run is open, otherwise when it is opened; before the first record.

        Raises ValueError, and changes nothing, where the state is of another version or model, or damaged.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE_VERSION:
            raise ValueError(f"the state is of version {version!r}, this GradWatch knows version {STATE_VERSION}")
        if not self._open:
            self._waiting = state
            return
        if self._recorded:
            raise ValueError(f"the run has {self._recorded} records of its own already")
        history, incidents = History(self.history.layout), IncidentTracker()
        try:
            saved = unpacked(state["history"])
            recorded, reached = int(state.get("recorded", saved["count"])), frozenset(state.get("reached", ()))
            if "latch" in state:
                incidents.load_state_dict(state["latch"], rules=[rule.name for rule in self._rules])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the state is damaged: {type(error).__name__}: {error}") from error
        history.load_state_dict(saved)
        self.history, self.incidents, self._recorded = history, incidents, recorded
        self._reached = np.array([site.name in reached for site in history.layout.sites], dtype=bool)
        self._codes = np.zeros(0, dtype=np.int8)
        self._inherited = frozenset((alert.rule, alert.step) for alert in incidents.alerts)

    def order(self, order: tuple[int, ...], edges: tuple[Edge, ...] | None = None) -> None:
        """The layers' order of execution has become known, or more of it, and the data flow between them."""
        layout = self.history.layout
        new, flow = set(order) - set(layout.order), merge_edges(layout.edges, edges)
        if new or flow != layout.edges:
            ran = (*layout.order, *(site for site in order if site in new))
            self.history.relayout(replace(layout, order=topological_order(ran, flow or ()), edges=flow))

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
        if self.outbox:
            self.outbox.record(self.history[-1])

    def close(self, overhead: float) -> None:
        """The run is over: the verdict to the sinks, once."""
        if not self._open:
            return
        self._open = False
        self.outbox.deliver()  # a sink that fails is in the verdict
        self.outbox.close(self.verdict(overhead))

    def verdict(self, overhead: float) -> Verdict:
        layout = self.history.layout
        return Verdict(
            ranked(self.incidents.alerts),
            self._recorded,
            len(layout.layers),
            overhead,
            self._untrained(),
            tuple(self.notes),
            self.intervention_summaries(),
        )

    def _judge(self, step: int) -> None:
        findings: dict[str, Sequence[Finding] | None] = {}
        fresh = self.history.fresh()
        for rule in tuple(self._rules):
            awaited = self._awaits[rule.name]
            if awaited and fresh.isdisjoint(awaited):
                findings[rule.name] = None
                continue
            try:
                found = rule(self.history)
                if found and self._traced(rule):
                    found = rule(self.history)
            except Exception as error:
                self._rules.remove(rule)
                self.drop("rule", rule.name, error)
                continue
            findings[rule.name] = found
            if found and getattr(rule, "distrusts_records", False):
                index = self.history.layout.index
                for finding in found:
                    sites = [index[site] for site in finding.sites if site in index]
                    self.history.distrust([0, *sites], back=finding.back)
        changes = self.incidents.update(step, findings, self.history.layout.index)
        if changes:
            self._spread(changes)
        if self.on_incidents is not None:
            old = [(one.rule, one.step) in self._inherited for one in self.incidents.open_alerts]
            self.on_incidents(
                [one for one, known in zip(self.incidents.open_alerts, old, strict=True) if not known],
                [one for one, known in zip(self.incidents.open_alerts, old, strict=True) if known],
                step,
            )

    def _spread(self, changes: IncidentChanges) -> None:
        """Send the incidents that changed at a step to the sinks and to `on_alert`."""
        # sinks that have no record of an incident would report it as new when it grows
        grown = tuple(alert for alert in changes.grown if (alert.rule, alert.step) not in self._inherited)
        news = self._kept(changes.opened + grown)
        self.outbox.alerts(news + changes.closed)
        for alert in news[: len(changes.opened)]:
            if alert.severity is not Severity.NOTICE:
                self._on_alert(alert)

    def _kept(self, alerts: tuple[Alert, ...]) -> tuple[Alert, ...]:
        """`alerts`, with the paths of the files that the flight recorder wrote for those it wants."""
        kept = {alert.rule: alert for alert in alerts}

        def keep(sink: Sink) -> None:
            if isinstance(sink, FlightRecorder) and (wanted := [a for a in kept.values() if sink.wants(a)]):
                paths = sink.keep(wanted, self.history, self.verdict(self._overhead()))
                kept.update({alert.rule: self.incidents.add_files(alert, **paths) for alert in wanted if paths})

        self.outbox.to_all(keep)
        return tuple(kept.values())

    def _overhead(self) -> float:
        """The share of time in the record before the latest."""
        shares = self.history.scalar("overhead", 2)
        return 0.0 if shares is None else float(np.nan_to_num(shares[0]))

    def _traced(self, rule: Rule) -> bool:
        """Whether the origin is known now, so that the rule has to run again."""
        known = any(alert.rule == rule.name for alert in self.incidents.open_alerts)
        if getattr(rule, "replays_batch", False) and not known:
            self.history.nonfinite_origin = self._trace()
        return self.history.nonfinite_origin is not None

    def _untrained(self) -> dict[str, str]:
        """Parameters of the model that never got a gradient, with the reason of the last record."""
        if not len(self._reached):
            return {}
        layout, codes = self.history.layout, self.history.codes(1)[-1]
        executed = set(layout.order)
        reasons: dict[str, str] = {}
        for place, owner in zip(layout.parameters, layout.owners, strict=True):
            if self._reached[place]:
                continue
            code = Missing(int(codes[place]))
            if code is Missing.UNMEASURABLE:  # no longer part of the model
                continue
            reason = code.reason
            if code is Missing.NO_GRADIENT and executed:
                reason = "detached (its layer runs)" if int(owner) in executed else "unused (its layer never runs)"
            reasons[layout.sites[place].name] = reason
        return reasons

    def note(self, note: str, *, said: str = "", error: Exception | None = None, log: bool = True) -> None:
        """Add a note that is not an alert to the verdict and, as `said`, to the log."""
        self.notes.append(note)
        if log:
            with preserve_bars(logger):
                logger.warning("%s", said or note)
        if error is not None:
            logger.debug("traceback of %s", type(error).__name__, exc_info=error)

    def drop(self, kind: str, name: str, error: Exception) -> None:
        """Report that a rule or sink failed and is not used any more."""
        note = f"the {kind} {name} failed and was switched off: {type(error).__name__}: {error}"
        self.note(note, said=f"GradWatch: {note}", error=error)
