"""Incidents: opened at a rule's first finding, grown by later ones, closed once the fault is gone."""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from gradwatch.core.alert import CONSEQUENCES, Alert, Finding, Severity, alert_to_dict


@dataclass(frozen=True, slots=True)
class IncidentChanges:
    """The incidents that changed at one step."""

    opened: tuple[Alert, ...] = ()
    closed: tuple[Alert, ...] = ()
    grown: tuple[Alert, ...] = ()
    """Incidents that more layers joined, that got worse, or that were reopened."""

    def __bool__(self) -> bool:
        return bool(self.opened or self.closed or self.grown)


class IncidentTracker:
    """Keeps the incidents of a run: at most one open incident per rule.

    Layers in which a fault is found later join the open incident. A fault that returns within `reopen_within` steps of
    the incident's end reopens it. A fault that follows from another one, which is open or recent, is a notice.
    """

    def __init__(self, *, close_after: int = 20, reopen_within: int = 200, effects_within: int = 50) -> None:
        self.close_after = close_after
        """Evaluations in a row without a finding that close an incident. Judgement."""
        self.reopen_within = reopen_within
        """Steps after its end during which a fault that returns reopens its incident. Judgement."""
        self.effects_within = effects_within
        """Steps after the last finding of a cause during which its consequences are notices, even if the cause is
        closed: dead units are found some tens of steps after the step that made them so. Judgement."""
        self._alerts: list[Alert] = []
        self._open: dict[str, int] = {}  # rule -> index in `_alerts`
        self._clean_evaluations: dict[str, int] = {}
        self._last_seen: dict[str, int] = {}

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All incidents so far, the oldest first, in their present state."""
        return tuple(self._alerts)

    @property
    def open_alerts(self) -> tuple[Alert, ...]:
        """The incidents that are open."""
        return tuple(self._alerts[i] for i in self._open.values())

    @property
    def open_rules(self) -> KeysView[str]:
        """The rules that have an open incident; the view follows as incidents open and close."""
        return self._open.keys()

    def update(
        self,
        step: int,
        findings: Mapping[str, Sequence[Finding] | None],
        order: Mapping[str, int] = MappingProxyType({}),
    ) -> IncidentChanges:
        """Open, grow and close incidents by the findings of each rule at `step`; None where a rule could not tell.

        `order`: site -> its place in the model; an incident names its layers in that order.
        """
        if not self._open and not any(findings.values()):
            return IncidentChanges()
        before = self.alerts
        closed = [
            alert
            for rule, found in findings.items()
            if found is not None and not found and (alert := self._clear(rule))
        ]
        opened = []
        for rule, found in findings.items():
            if found:
                self._clean_evaluations[rule], self._last_seen[rule] = 0, step
                if not self._grow(rule, step, found, order):
                    opened.append(self._open_incident(rule, step, found))
        changed = [alert for was, alert in zip(before, self._alerts, strict=False) if alert is not was]
        grown = [alert for alert in changed if alert.closed_step is None]
        return IncidentChanges(tuple(opened), tuple(closed), tuple(grown))

    def add_files(self, alert: Alert, *, incident_file: str, checkpoint: str) -> Alert:
        """Note in the incident of `alert` the files that were saved for it; returns it."""
        place = next(i for i, known in enumerate(self._alerts) if (known.rule, known.step) == (alert.rule, alert.step))
        self._alerts[place] = replace(self._alerts[place], incident_file=incident_file, checkpoint=checkpoint)
        return self._alerts[place]

    def state_dict(self) -> dict[str, object]:
        """Numbers and text of Python's own types: numpy's would make a checkpoint unloadable."""
        return {
            "alerts": [alert_to_dict(alert) for alert in self._alerts],
            "open": {str(rule): place for rule, place in self._open.items()},
            "clean": {str(rule): times for rule, times in self._clean_evaluations.items()},
            "last_seen": {str(rule): int(step) for rule, step in self._last_seen.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, rules: Iterable[str] | None = None) -> None:
        """Continue from a state. Open incidents stay open, except those of rules that are not among `rules` any more.

        Raises LookupError, TypeError, ValueError or AttributeError for a state that `state_dict` did not make.
        """
        alerts = [_alert_from_dict(fields) for fields in state["alerts"]]
        opened = {str(rule): int(place) for rule, place in state["open"].items()}
        clean = {str(rule): int(times) for rule, times in state["clean"].items()}
        last_seen = {str(rule): int(step) for rule, step in state["last_seen"].items()}
        for rule, place in opened.items():
            if place < 0 or alerts[place].rule != rule or alerts[place].closed_step is not None or rule not in clean:
                raise ValueError(f"its open incident of {rule} is not among its alerts")
        for rule in opened.keys() - set(opened if rules is None else rules):
            place = opened.pop(rule)
            alerts[place] = replace(alerts[place], closed_step=last_seen[rule])
        self._alerts, self._open, self._clean_evaluations, self._last_seen = alerts, opened, clean, last_seen

    def _grow(self, rule: str, step: int, found: Sequence[Finding], order: Mapping[str, int]) -> bool:
        """Add the findings to the rule's incident that is open or recent, and reopen it; False if there is none."""
        place = self._open.get(rule)
        if place is None:
            place = next((i for i in reversed(range(len(self._alerts))) if self._alerts[i].rule == rule), None)
            if place is None or step - (self._alerts[place].closed_step or 0) > self.reopen_within:
                return False
            before = self._alerts[place]
            self._alerts[place] = replace(before, closed_step=None, times=before.times + 1)
            self._open[rule] = place
        self._alerts[place] = _joined(self._alerts[place], found[0], _sites(found), order)
        return True

    def _open_incident(self, rule: str, step: int, found: Sequence[Finding]) -> Alert:
        """Open the rule's incident: a notice where its cause is open or recent."""
        first = found[0]
        recent = (
            cause
            for cause, seen in self._last_seen.items()
            if cause in self._open or step - seen <= self.effects_within
        )
        follows = any(rule in CONSEQUENCES.get(cause, ()) for cause in recent)
        alert = Alert(
            rule,
            Severity.NOTICE if follows else first.severity,
            first.layer,
            _sites(found),
            step,
            first.value,
            first.threshold,
            first.message,
            first.remedy,
        )
        self._open[rule] = len(self._alerts)
        self._alerts.append(alert)
        return alert

    def _clear(self, rule: str) -> Alert | None:
        """Count an evaluation without a finding; returns the incident if that closes it."""
        if rule not in self._open:
            return None
        self._clean_evaluations[rule] += 1
        if self._clean_evaluations[rule] < self.close_after:
            return None
        place = self._open.pop(rule)
        self._alerts[place] = replace(self._alerts[place], closed_step=self._last_seen[rule])
        return self._alerts[place]


def _sites(found: Sequence[Finding]) -> tuple[str, ...]:
    """The sites of all findings, each once."""
    return tuple(dict.fromkeys(site for finding in found for site in finding.sites))


def _joined(alert: Alert, finding: Finding, sites: Sequence[str], order: Mapping[str, int]) -> Alert:
    """`alert` with the new sites, and the severity of `finding` if that is worse; a notice stays one."""
    known = set(alert.sites)
    more = tuple(site for site in sites if site not in known)
    worse = finding.severity.order > alert.severity.order and alert.severity is not Severity.NOTICE
    if not more and not worse:
        return alert
    named = alert.sites + more
    if more:
        named = tuple(sorted(named, key=lambda site: order.get(site, len(order))))
    return replace(alert, sites=named, severity=finding.severity if worse else alert.severity)


def _alert_from_dict(fields: Mapping[str, Any]) -> Alert:
    return Alert(**{**fields, "severity": Severity(fields["severity"]), "sites": tuple(fields["sites"])})
