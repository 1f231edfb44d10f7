"""From findings to incidents: severities, alerts, the latch that opens and closes them, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from gradwatch.causes import EXPLAINS
from gradwatch.harmless import Wanted

MAX_NAMES = 4
"""Layer names spelt out in one line before they are counted instead. Judgement."""


class Severity(str, Enum):
    """How bad: `ERROR` the run is lost or will be, `WARNING` it learns worse than it should, `NOTICE` report only."""

    NOTICE = "notice"
    WARNING = "warning"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value

    @property
    def rank(self) -> int:
        return ("notice", "warning", "error").index(self.value)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule sees at one step."""

    rule: str
    severity: Severity
    layer: str
    """The layer to look at first."""
    sites: tuple[str, ...]
    """Every layer concerned, in model order."""
    value: float
    threshold: float
    message: str
    """Evidence and likely cause, full sentences."""
    remedy: str
    """One concrete change."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An incident: one fault, from the step it began to the step it was over."""

    rule: str
    severity: Severity
    layer: str
    sites: tuple[str, ...]
    step: int
    value: float
    threshold: float
    message: str
    remedy: str
    closed_step: int | None = None
    times: int = 1
    """How often the fault came back within this incident."""

    def __str__(self) -> str:
        since = f"at step {self.step}" if self.closed_step == self.step else f"since step {self.step}"
        return f"{self.rule} in {listing(self.sites or (self.layer,))} {since}: {self.message} Try: {self.remedy}"


class AlertRaised(Wanted, RuntimeError):  # noqa: N818 (not an error: it was asked for)
    """Ends a training on purpose: `on_alert="raise"`."""

    def __init__(self, alert: Alert) -> None:
        super().__init__(str(alert))
        self.alert = alert


def listing(names: Sequence[str]) -> str:
    """Names for a sentence; a long list keeps both ends: 'a, b ... z (17 layers)'."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} layers)"


@dataclass(frozen=True, slots=True)
class Changes:
    """What one step did to the incidents."""

    opened: tuple[Alert, ...] = ()
    closed: tuple[Alert, ...] = ()
    grown: tuple[Alert, ...] = ()
    """Those that layers have joined, that got worse, or that came back."""


class Latch:
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

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every incident so far, oldest first, as it stands."""
        return tuple(self._alerts)

    @property
    def open(self) -> tuple[Alert, ...]:
        return tuple(self._alerts[i] for i in self._open.values())

    def update(self, step: int, findings: Mapping[str, Sequence[Finding] | None]) -> Changes:
        """Take in what the rules found at `step`: rule name -> findings, None where the rule could not tell."""
        before = self.alerts
        closed = [alert for rule, found in findings.items() if _clean(found) and (alert := self._rest(rule))]
        opened = [alert for rule, found in findings.items() if found and (alert := self._see(rule, step, found))]
        changed = [alert for was, alert in zip(before, self._alerts, strict=False) if alert is not was]
        grown = [alert for alert in changed if alert.closed_step is None]
        return Changes(tuple(opened), tuple(closed), tuple(grown))

    def state_dict(self) -> dict[str, object]:
        """Plain numbers and text, whatever a rule's findings are made of (numpy would make a checkpoint unloadable)."""
        return {
            "alerts": [_plain(alert) for alert in self._alerts],
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
            self._alerts[place] = _joined(self._alerts[place], found[0], sites)
            return None
        last = next((i for i in reversed(range(len(self._alerts))) if self._alerts[i].rule == rule), None)
        if last is not None and step - (self._alerts[last].closed_step or 0) <= self.cooldown:
            before = self._alerts[last]
            reopened = replace(before, closed_step=None, times=before.times + 1)
            self._alerts[last] = _joined(reopened, found[0], sites)
            self._open[rule] = last
            return None
        head = found[0]
        recent = (
            cause for cause, seen in self._last_seen.items() if cause in self._open or step - seen <= self.aftermath
        )
        explained = any(rule in EXPLAINS.get(cause, ()) for cause in recent)
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


def _joined(alert: Alert, finding: Finding, sites: Sequence[str]) -> Alert:
    """`alert` with the layers that fell ill since; it worsens but does not improve."""
    known = set(alert.sites)
    more = tuple(site for site in sites if site not in known)
    worse = finding.severity.rank > alert.severity.rank and alert.severity is not Severity.NOTICE
    if not more and not worse:
        return alert
    return replace(alert, sites=alert.sites + more, severity=finding.severity if worse else alert.severity)


def _plain(alert: Alert) -> dict[str, object]:
    fields = {key: str(value) if isinstance(value, str) else value for key, value in asdict(alert).items()}
    numbers = {"value": float(alert.value), "threshold": float(alert.threshold), "step": int(alert.step)}
    return {**fields, **numbers, "severity": alert.severity.value, "sites": [str(site) for site in alert.sites]}


def _revived(fields: Mapping[str, Any]) -> Alert:
    return Alert(**{**fields, "severity": Severity(fields["severity"]), "sites": tuple(fields["sites"])})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranked summary of a run; `str()` is the terminal text."""

    incidents: tuple[Alert, ...]
    """Worst first; consequences after their causes."""
    steps: int
    """Optimizer steps watched."""
    layers: int
    overhead: float
    """Share of the step time that GradWatch took."""
    untrained: Mapping[str, str]
    """Trainable or frozen parameters that never got a gradient, and why."""
    notes: tuple[str, ...] = ()
    """What GradWatch could not do: rules and sinks that failed, modes it does not measure."""

    @property
    def healthy(self) -> bool:
        return not any(alert.severity is not Severity.NOTICE for alert in self.incidents)

    def __str__(self) -> str:
        return "\n".join(self._lines(self.incidents))

    @property
    def brief(self) -> str:
        """The text without the incidents."""
        return "\n".join(self._lines(()))

    def _lines(self, incidents: Iterable[Alert]) -> list[str]:
        what = f"{self.layers} layers over {self.steps} steps, overhead {100 * self.overhead:.1f} %"
        loud = [alert for alert in self.incidents if alert.severity is not Severity.NOTICE]
        if loud:
            lines = [f"GradWatch: {len(loud)} incident{'s' * (len(loud) > 1)} in {what}"]
        else:
            lines = [f"GradWatch: healthy. {what}" if self.steps else "GradWatch: no step was measured."]
        for number, alert in enumerate(incidents, 1):
            end = "still open" if alert.closed_step is None else f"over after step {alert.closed_step}"
            back = f", came back {alert.times - 1} times" if alert.times > 1 else ""
            lines += [
                f"{number}. {alert.severity}: {alert.rule} in {listing(alert.sites or (alert.layer,))}",
                f"   since step {alert.step} ({end}{back})",
                f"   {alert.message}",
                f"   Try: {alert.remedy}",
            ]
        lines += _untrained_lines(self.untrained)
        return lines + [f"Note: {note}" for note in self.notes]


def _untrained_lines(untrained: Mapping[str, str]) -> list[str]:
    """One line per reason, for the parameters that never got a gradient."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in untrained.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"Never got a gradient, {reason}: {listing(names).replace(' layers)', ' parameters)')}"
        for reason, names in by_reason.items()
    ]


def rank(alerts: Iterable[Alert]) -> tuple[Alert, ...]:
    """Worst first: by severity, then causes before what follows from them, then by age."""
    alerts = tuple(alerts)
    present = {alert.rule for alert in alerts}

    def follows(alert: Alert) -> int:
        return sum(alert.rule in EXPLAINS.get(cause, ()) for cause in present)

    return tuple(sorted(alerts, key=lambda alert: (-alert.severity.rank, follows(alert), alert.step)))
