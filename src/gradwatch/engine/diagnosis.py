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
from gradwatch.core.arguments import MOST, check_items, check_whole, damage
from gradwatch.core.block import Block
from gradwatch.core.guard import error_text
from gradwatch.core.history import History, NonfiniteOrigin
from gradwatch.core.layer_graph import merge_edges, topological_order
from gradwatch.core.loss_levels import LossLevels
from gradwatch.core.record import (
    MEASURED,
    NO_GRADIENT,
    OTHER_OPTIMIZER,
    UNMEASURABLE,
    Layout,
    Missing,
    Run,
    module_of,
    modules_around,
)
from gradwatch.core.training_loop import LoopKind
from gradwatch.engine.history_state import packed, unpacked
from gradwatch.engine.joined_arrays import join_arrays, split_arrays
from gradwatch.measure.modules.sampled_step import LayerFlow
from gradwatch.rules import Rule
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.incidents import IncidentChanges, IncidentTracker
from gradwatch.rules.loop_terms import worded
from gradwatch.rules.rule import rows_to_call, samples_of
from gradwatch.sinks import Sink
from gradwatch.sinks.dispatcher import Dispatcher
from gradwatch.sinks.flight_recorder import FlightRecorder
from gradwatch.sinks.terminal.progress_bars import preserve_bars

logger = logging.getLogger("gradwatch")

STATE_VERSION = 2
"""Version of the format of `Diagnosis.state_dict()`; raised when an older GradWatch could not read a new state."""


class Diagnosis:
    """Keeps the history, runs the rules and feeds the sinks. A rule or sink that raises is dropped, with a warning."""

    def __init__(
        self,
        rules: Sequence[Rule],
        sinks: Sequence[Sink],
        *,
        on_alert: Callable[[Alert], None],
        logs: bool = True,
        trace: Callable[[], NonfiniteOrigin | None] = lambda: None,
    ) -> None:
        """`logs`: whether this rank is the one that tells people. `trace`: runs the batch of the latest record again,
        when a rule with `replays_batch` opens an incident.
        """
        self.logs = logs
        self.history = History(Layout(()))
        self.incidents = IncidentTracker()
        self.notes: list[str] = []
        self.failed = False
        """Whether what feeds it has failed: no more records will come, though the run goes on."""
        self.intervention_summaries: Callable[[], tuple[str, ...]] = tuple
        """The lines about interventions in the verdict."""
        self.changes_of_signals: Callable[[], Mapping[str, bool]] = dict
        """The interventions that change backward signals, in words -> whether they make them 0."""
        self.run_steps: Callable[[], int] = int
        """The number of optimizer steps so far, where some are not measured; 0 where all are."""
        self.on_incidents: Callable[[Sequence[Alert], Sequence[Alert], int], None] | None = None
        """Called when the rules have judged a step, with the open incidents of this fit, those that were already open
        in a checkpoint, and the step."""
        self._rules = list(rules)
        self._selective = frozenset(rule.name for rule in rules if getattr(rule, "suspects", None) is not None)
        """Rules that say at which rows they are to be called; others are called at all that can tell them something."""
        self._samples = {rule.name: needs for rule in rules if (needs := samples_of(rule))}
        """Rules that need samples only -> of which statistics."""
        self.dispatcher = Dispatcher(sinks, dropped=partial(self.drop, "sink"))
        self._on_alert, self._trace = on_alert, trace
        self._open = False
        self._loop: LoopKind = "automatic"
        self._recorded = 0
        self.judged_step = 0
        """`Record.step` of the record that is being judged, or was last."""
        self._losses = LossLevels()
        self._reached: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        """Sites that got a gradient at least once."""
        self._inherited: frozenset[tuple[str, int]] = frozenset()
        """Incidents from a loaded state, by rule and step; they were reported before the run was interrupted."""

    def open(self, run: Run, loop: LoopKind = "automatic") -> None:
        """Begin a run, or go on with one whose layout has grown. `loop`: in whose terms alerts are written."""
        if len(self.history):
            known = self.history.layout
            more = replace(run.layout, order=known.order, edges=known.edges) if known.order else run.layout
            self.history.relayout(replace(more, unowned=known.unowned, loss_parameters=known.loss_parameters))
        else:
            self.history = History(run.layout)
        self._loop = loop
        self.dispatcher.open(run)
        self._open = True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to raise the alerts of an uninterrupted one: tensors, numbers and text.

        Rules and sinks that were dropped are not in it: a resumed run uses them again.
        """
        sites = self.history.layout.sites
        return {
            "version": STATE_VERSION,
            "history": join_arrays(packed(self.history.state_dict())),
            "incidents": self.incidents.state_dict(),
            "recorded": self._recorded,
            "losses": self._losses.state_dict(),
            "reached": [sites[place].name for place in np.flatnonzero(self._reached)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, when the run is open and before its first record.

        Raises ValueError, and changes nothing, where the state is of another version or model, or damaged.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE_VERSION:
            raise ValueError(f"the state is of version {version!r}, this GradWatch knows version {STATE_VERSION}")
        if self._recorded:
            raise ValueError(f"the run has {self._recorded} records of its own already")
        history, incidents, losses = History(self.history.layout), IncidentTracker(), LossLevels()
        try:
            saved = unpacked(split_arrays(state["history"]))
            recorded = check_whole("recorded", state["recorded"], "records", least=0)
            reached = frozenset(map(str, state["reached"]))
            losses.load_state_dict(state["losses"])
            incidents.load_state_dict(state["incidents"], rules=[rule.name for rule in self._rules])
            history.load_state_dict(saved)
        except Exception as error:  # a state may hold anything, and its values raise anything
            raise ValueError(damage(error)) from error
        self.history, self.incidents, self._recorded, self._losses = history, incidents, recorded, losses
        self._reached = np.array([site.name in reached for site in history.layout.sites], dtype=bool)
        self._inherited = frozenset(alert.key for alert in incidents.alerts)

    def learn_flow(self, flow: LayerFlow) -> None:
        """`flow` has become known, or more of it."""
        layout = self.history.layout
        new, edges = set(flow.order) - set(layout.order), merge_edges(layout.edges, flow.edges)
        if new or edges != layout.edges:
            ran = (*layout.order, *(site for site in flow.order if site in new))
            layout = replace(layout, order=topological_order(ran, edges or ()), edges=edges)
        if flow.unowned and flow.unowned != layout.unowned:
            layout = replace(layout, unowned=flow.unowned)
        if flow.loss_parameters and flow.loss_parameters != layout.loss_parameters:
            layout = replace(layout, loss_parameters=flow.loss_parameters)
        if layout is not self.history.layout:
            self.history.relayout(layout)

    def judge(self, block: Block) -> None:
        """Add the rows of `block` to the history, and judge them in their order."""
        self.history.extend(block)
        self._losses.add(block.scalars, block.optimizers)
        measured = (block.codes == MEASURED).any(axis=0)
        more = len(measured) - len(self._reached)
        self._reached = (np.pad(self._reached, (0, more)) if more else self._reached) | measured
        count, judged, suspected = len(block.steps), 0, self._suspected(block)
        open_rules = self.incidents.open_rules
        for row, step in enumerate(block.steps.tolist()):
            self.judged_step = step
            self._recorded += 1
            names = {name for name, rows in suspected.items() if rows[row - judged]} if suspected else ()
            if names or open_rules:
                called = [
                    rule
                    for rule in self._rules
                    if rule.name in names or (rule.name in open_rules and rule.name in self._selective)
                ]
                if self._judge(called, step, count - row) and row + 1 < count:
                    judged = row + 1
                    suspected = self._suspected(block.rows(judged, count))  # baselines have changed
            if self.on_incidents is not None:
                faults = self.incidents.open_faults
                old = [one for one in faults if one.key in self._inherited]
                self.on_incidents([one for one in faults if one not in old], old, step)

    def close(self, overhead: float) -> None:
        """The run is over: the verdict to the sinks, once."""
        if not self._open:
            return
        self._open = False
        self.dispatcher.close(self.verdict(overhead))

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
            self._losses.levels,
            run_steps=steps if (steps := self.run_steps()) > self._recorded > 0 else None,
            failed=self.failed,
        )

    def note(self, note: str, *, error: Exception | None = None) -> None:
        """Add a note that is not an alert to the verdict and the log; every rank logs one on an `error`."""
        self.notes.append(note)
        if self.logs or error is not None:
            with preserve_bars(logger):
                logger.warning("%s", note if note.startswith("GradWatch ") else f"GradWatch: {note}")
        if error is not None:
            logger.debug("traceback of %s", type(error).__name__, exc_info=error)

    def note_once(self, note: str) -> None:
        """Add a note unless it is there."""
        if note not in self.notes:
            self.note(note)

    def drop(self, kind: str, name: str, error: Exception) -> None:
        """Report that a rule or sink failed and is not used any more."""
        self.note(f"the {kind} {name} failed and was switched off: {error_text(error)}", error=error)

    def _suspected(self, block: Block) -> dict[str, list[bool]]:
        """For each rule that may find something, at which rows of `block`, the latest records, it may."""
        count, recent, found = len(block.steps), RecentRows(self.history, block), dict[str, list[bool]]()
        fresh = recent.fresh.keys()
        for rule in tuple(self._rules):
            if rule.name in self._samples and self._samples[rule.name].isdisjoint(fresh):
                continue
            try:
                asked = getattr(rule, "suspects", None)
                mask = rows_to_call(rule, recent) if asked is None else asked(recent)
                if mask.shape != (count,):
                    raise ValueError(f"suspects returned the shape {mask.shape} for {count} rows")
                if mask.any():
                    found[rule.name] = (mask | found[rule.name] if rule.name in found else mask).tolist()
            except Exception as error:
                self._switch_off(rule, error)
        return found

    def _judge(self, rules: Sequence[Rule], step: int, back: int) -> bool:
        """Call `rules` at the record of `step`, the one `back` from the end; returns whether baselines have changed."""
        history, findings = self.history.until(-back), dict[str, Sequence[Finding] | None]()
        changed = False
        for rule in rules:
            try:
                found = rule(history)
                if found and back == 1 and self._traced(rule, history):
                    found = rule(history)
                if found:
                    found = check_items("result", found, "a list of findings, or None", kind=Finding, most=MOST)
                    found = [worded(finding, self._loop, self.changes_of_signals()) for finding in found]
            except Exception as error:
                self._switch_off(rule, error)
                continue
            findings[rule.name] = found
            if found and getattr(rule, "distrusts_records", False):
                index, changed = history.layout.index, True
                for finding in found:
                    sites = [index[site] for site in finding.sites if site in index]
                    history.distrust([0, *sites], back=finding.onset)
        onset = partial(_onset, history)
        changes = self.incidents.update(step, findings, history.layout.index, onset=onset)
        if changes:
            self._spread(changes, history)
        return changed

    def _switch_off(self, rule: Rule, error: Exception) -> None:
        self._rules.remove(rule)
        self.drop("rule", rule.name, error)

    def _spread(self, changes: IncidentChanges, history: History) -> None:
        """Send the incidents that changed at the latest record of `history` to the sinks and to `on_alert`."""
        # sinks that have no record of an incident would report it as new when it grows
        grown = tuple(alert for alert in changes.grown if alert.key not in self._inherited)
        news = self._kept(changes.opened + grown, history)
        self.dispatcher.alerts(news + changes.closed)
        worse = {alert.key for alert in changes.worse}
        for place, alert in enumerate(news):
            new = place < len(changes.opened) or alert.key in worse
            if new and alert.severity is not Severity.NOTICE:
                self._on_alert(alert)

    def _kept(self, alerts: tuple[Alert, ...], history: History) -> tuple[Alert, ...]:
        """`alerts`, with the paths of the files that the flight recorder wrote for those it wants."""
        kept = {alert.rule: alert for alert in alerts}

        def keep(sink: Sink) -> None:
            if isinstance(sink, FlightRecorder) and (wanted := [a for a in kept.values() if sink.wants(a)]):
                overhead = float(np.nan_to_num(history.scalar("overhead", 2)[0]))  # of the record before the latest
                paths = sink.keep(wanted, history, self.verdict(overhead))
                kept.update({alert.rule: self.incidents.add_files(alert, **paths) for alert in wanted if paths})

        self.dispatcher.to_all(keep)
        return tuple(kept.values())

    def _traced(self, rule: Rule, history: History) -> bool:
        """Whether the origin is known now, so that the rule has to run again."""
        if getattr(rule, "replays_batch", False) and rule.name not in self.incidents.open_rules:
            history.nonfinite_origin = self._trace()
        return history.nonfinite_origin is not None

    def _untrained(self) -> dict[str, str]:
        """Parameters of the model that never got a gradient, with the reason of the last record at which their
        optimizer stepped.
        """
        if not len(self._reached) or not len(self.history):
            return {}
        layout, codes = self.history.layout, self.history.codes(1)[-1]
        sites = layout.parameters
        others = sites[(codes[sites] == OTHER_OPTIMIZER) & ~self._reached[sites]]
        if len(others):
            every = self.history.codes(len(self.history))[:, others]
            own = every != OTHER_OPTIMIZER
            latest = len(every) - 1 - own[::-1].argmax(axis=0)
            codes = codes.copy()
            codes[others] = every[latest, np.arange(len(others))]
        executed = set(layout.order)
        idle = "in an optimizer that was not seen to step"
        idle += "" if self.history.whole else f" since step {self.history.steps[0]}"
        trained = layout.names(sites[self._reached[sites]])
        holding = {module for name in trained for module in (module_of(name), *modules_around(name))}
        # these use the weights of their out_proj, and do not call it
        ran = [layout.sites[site] for site in layout.order]
        attentions = {module_of(site.name) for site in ran if site.module == "MultiheadAttention"}
        reasons: dict[str, str] = {}
        for place, owner in zip(layout.parameters, layout.owners, strict=True):
            if self._reached[place]:
                continue
            code = int(codes[place])
            if code == UNMEASURABLE:  # no longer part of the model
                continue
            reason = Missing(code).reason if code != OTHER_OPTIMIZER else idle
            if code == NO_GRADIENT and executed:
                reason = "unused (its layer never runs)"
                if int(owner) in executed:
                    reason = "although its layer runs"
                elif attentions.intersection(modules_around(layout.sites[owner].name)[:1]):
                    reason = "although the attention around it runs"
                elif module_of(layout.sites[owner].name) in holding:
                    reason = "although others of its module are"
            reasons[layout.sites[place].name] = reason
        return reasons


def _onset(history: History, finding: Finding) -> int:
    """The step of the record at which the fault begins, or of the oldest that is kept."""
    return history[-min(finding.onset, len(history))].step
