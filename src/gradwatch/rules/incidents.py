"""The latch: it opens an incident at a rule's first finding and closes it when all is well again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from gradwatch.core.alert import CONSEQUENCES, Alert, Finding, Severity, alert_to_dict


@dataclass(frozen=True, slots=True)
class IncidentChanges:
    """What one step did to the incidents."""

    opened: tuple[Alert, ...] = ()
    closed: tuple[Alert, ...] = ()
    grown: tuple[Alert, ...] = ()
    """Those that layers have joined, that got worse, or that came back."""

    def __bool__(self) -> bool:
        return bool(self.opened or self.closed or self.grown)


class IncidentTracker:
    """Opens an incident at a rule's first finding, keeps it while it lasts, closes it with hysteresis.

    One incident per rule at a time; layers that fall ill later join it. An incident that comes back within `cooldown`
    steps of its end is the same one, reopened in silence. What follows from a cause that is open, or was lately, is a
    notice.
    """

    def __init__(self, *, close_after: int = 20, cooldown: int = 200, aftermath: int = 50) -> None:
        self.close_after = close_after
        """Clean evaluations in a row that end an incident. Judgement."""
        self.cooldown = cooldown
        """Steps after its end during which a fault that returns is the same incident. Judgement."""
        self.aftermath = aftermath
        """Steps after its last finding during which a cause explains what follows from it, closed or not: units that
        a step has killed are known to be dead some tens of steps later. Judgement."""
        self._alerts: list[Alert] = []
        self._open: dict[str, int] = {}
        self._clean: dict[str, int] = {}
        self._last_seen: dict[str, int] = {}
        self._order: Mapping[str, int] = {}

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every incident so far, oldest first, as it stands."""
        return tuple(self._alerts)

    @property
    def open(self) -> tuple[Alert, ...]:
        return tuple(self._alerts[i] for i in self._open.values())

    def update(
        self,
        step: int,
        findings: Mapping[str, Sequence[Finding] | None],
        order: Mapping[str, int] = MappingProxyType({}),
    ) -> IncidentChanges:
        """Take in what the rules found at `step`: rule name -> findings, None where the rule could not tell.

        `order`: where each site stands in the model; an incident that layers join names them in that order.
        """
        self._order = order
        if not self._open and not any(findings.values()):
            return IncidentChanges()
        before = self.alerts
        closed = [alert for rule, found in findings.items() if _clean(found) and (alert := self._rest(rule))]
        opened = [alert for rule, found in findings.items() if found and (alert := self._see(rule, step, found))]
        changed = [alert for was, alert in zip(before, self._alerts, strict=False) if alert is not was]
        grown = [alert for alert in changed if alert.closed_step is None]
        return IncidentChanges(tuple(opened), tuple(closed), tuple(grown))

    def keep(self, alert: Alert, *, bundle: str, checkpoint: str) -> Alert:
        """`alert` with what was kept of it, which it says from now on."""
        place = next(i for i, known in enumerate(self._alerts) if (known.rule, known.step) == (alert.rule, alert.step))
        self._alerts[place] = replace(self._alerts[place], bundle=bundle, checkpoint=checkpoint)
        return self._alerts[place]

    def state_dict(self) -> dict[str, object]:
        """Plain numbers and text, whatever a rule's findings are made of (numpy would make a checkpoint unloadable)."""
        return {
            "alerts": [alert_to_dict(alert) for alert in self._alerts],
            "open": {str(rule): place for rule, place in self._open.items()},
            "clean": {str(rule): times for rule, times in self._clean.items()},
            "last_seen": {str(rule): int(step) for rule, step in self._last_seen.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, rules: Iterable[str] | None = None) -> None:
        """What was open stays open, but for what none of `rules` would ever close again.

        Raises LookupError, TypeError, ValueError or AttributeError for what `state_dict` did not make.
        """
        alerts = [_revived(fields) for fields in state["alerts"]]
        opened = {str(rule): int(place) for rule, place in state["open"].items()}
        clean = {str(rule): int(times) for rule, times in state["clean"].items()}
        last_seen = {str(rule): int(step) for rule, step in state["last_seen"].items()}
        for rule, place in opened.items():
            if place < 0 or alerts[place].rule != rule or alerts[place].closed_step is not None or rule not in clean:
                raise ValueError(f"its open incident of {rule} is not among its alerts")
        for rule in opened.keys() - set(opened if rules is None else rules):
            place = opened.pop(rule)
            alerts[place] = replace(alerts[place], closed_step=last_seen[rule])
        self._alerts, self._open, self._clean, self._last_seen = alerts, opened, clean, last_seen

    def _see(self, rule: str, step: int, found: Sequence[Finding]) -> Alert | None:
        self._clean[rule] = 0
        self._last_seen[rule] = step
        sites = tuple(dict.fromkeys(site for finding in found for site in finding.sites))
        if rule in self._open:
            place = self._open[rule]
            self._alerts[place] = _joined(self._alerts[place], found[0], sites, self._order)
            return None
        last = next((i for i in reversed(range(len(self._alerts))) if self._alerts[i].rule == rule), None)
        if last is not None and step - (self._alerts[last].closed_step or 0) <= self.cooldown:
            before = self._alerts[last]
            reopened = replace(before, closed_step=None, times=before.times + 1)
            self._alerts[last] = _joined(reopened, found[0], sites, self._order)
            self._open[rule] = last
            return None
        head = found[0]
        recent = (
            cause for cause, seen in self._last_seen.items() if cause in self._open or step - seen <= self.aftermath
        )
        explained = any(rule in CONSEQUENCES.get(cause, ()) for cause in recent)
        severity = Severity.NOTICE if explained else head.severity
        alert = Alert(rule, severity, head.layer, sites, step, head.value, head.threshold, head.message, head.remedy)
        self._open[rule] = len(self._alerts)
        self._alerts.append(alert)
        return alert

    def _rest(self, rule: str) -> Alert | None:
        if rule not in self._open:
            return None
        self._clean[rule] += 1
        if self._clean[rule] < self.close_after:
            return None
        place = self._open.pop(rule)
        self._alerts[place] = replace(self._alerts[place], closed_step=self._last_seen[rule])
        return self._alerts[place]


def _clean(found: Sequence[Finding] | None) -> bool:
    return found is not None and not found


def _joined(alert: Alert, finding: Finding, sites: Sequence[str], order: Mapping[str, int]) -> Alert:
    """`alert` with the layers that fell ill since; it worsens but does not improve."""
    known = set(alert.sites)
    more = tuple(site for site in sites if site not in known)
    worse = finding.severity.order > alert.severity.order and alert.severity is not Severity.NOTICE
    if not more and not worse:
        return alert
    named = alert.sites + more
    if more:
        named = tuple(sorted(named, key=lambda site: order.get(site, len(order))))
    return replace(alert, sites=named, severity=finding.severity if worse else alert.severity)


def _revived(fields: Mapping[str, Any]) -> Alert:
    return Alert(**{**fields, "severity": Severity(fields["severity"]), "sites": tuple(fields["sites"])})
