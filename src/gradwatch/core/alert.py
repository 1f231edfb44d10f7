"""Findings, the incidents that come of them, and the verdict that ranks those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from gradwatch.core.causes import EXPLAINS
from gradwatch.core.guard import UserFacingError

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
    """Its name, such as "vanishing"."""
    severity: Severity
    layer: str
    """The layer to look at first."""
    sites: tuple[str, ...]
    """Every layer concerned, in model order."""
    value: float
    """What was found, in the rule's own unit: docs/alerts has a page for each."""
    threshold: float
    """From where on that is a fault, in the same unit."""
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
    """The layer to look at first."""
    sites: tuple[str, ...]
    """Every layer concerned, in model order."""
    step: int
    """Optimizer steps taken before the one at which it began."""
    value: float
    threshold: float
    message: str
    """Evidence and likely cause, full sentences."""
    remedy: str
    """One concrete change."""
    closed_step: int | None = None
    """The last step at which it was seen; None while it is open."""
    times: int = 1
    """How often the fault came back within this incident."""
    bundle: str = ""
    """Path of the flight recorder's file; empty if there is none."""
    checkpoint: str = ""
    """Path of the last checkpoint from before anything was wrong; empty if there is none."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Where to find what was kept of it."""
        places = {"Incident file": self.bundle, "Last healthy checkpoint": self.checkpoint}
        return tuple(f"{what}: {path}" for what, path in places.items() if path)

    def __str__(self) -> str:
        since = f"at step {self.step}" if self.closed_step == self.step else f"since step {self.step}"
        where = listing(self.sites or (self.layer,))
        return f"{self.rule} in {where} {since}: {self.message} Try: {self.remedy} {'; '.join(self.kept)}".rstrip()


class AlertRaised(UserFacingError, RuntimeError):  # noqa: N818 (not an error: it was asked for)
    """Ends a training on purpose: `on_alert="raise"`."""

    def __init__(self, alert: Alert) -> None:
        super().__init__(str(alert))
        self.alert = alert


def listing(names: Sequence[str]) -> str:
    """Names for a sentence; a long list keeps both ends: 'a, b ... z (17 layers)'."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} layers)"


def plain(alert: Alert) -> dict[str, object]:
    """Numbers, text and lists."""
    fields = {key: str(value) if isinstance(value, str) else value for key, value in asdict(alert).items()}
    numbers = {"value": float(alert.value), "threshold": float(alert.threshold), "step": int(alert.step)}
    return {**fields, **numbers, "severity": alert.severity.value, "sites": [str(site) for site in alert.sites]}


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
    interventions: tuple[str, ...] = ()
    """What each intervention has done, in words."""

    @property
    def healthy(self) -> bool:
        """Whether there is nothing but notices."""
        return not any(alert.severity is not Severity.NOTICE for alert in self.incidents)

    def __str__(self) -> str:
        return "\n".join(self._lines(self.incidents))

    @property
    def brief(self) -> str:
        """The text without the incidents."""
        return "\n".join(self._lines(()))

    def _lines(self, incidents: Iterable[Alert]) -> list[str]:
        watched = f"{self.layers} layer{'s' * (self.layers != 1)} over {self.steps} step{'s' * (self.steps != 1)}"
        what = f"{watched}, overhead {100 * self.overhead:.1f} %"
        loud = [alert for alert in self.incidents if alert.severity is not Severity.NOTICE]
        if loud:
            lines = [f"GradWatch: {len(loud)} incident{'s' * (len(loud) > 1)} in {what}"]
        else:
            lines = [f"GradWatch: healthy. {what}" if self.steps else "GradWatch: no step was measured."]
        for number, alert in enumerate(incidents, 1):
            end = "still open" if alert.closed_step is None else f"over after step {alert.closed_step}"
            back = f", came back {alert.times - 1} time{'s' * (alert.times > 2)}" if alert.times > 1 else ""
            lines += [
                f"{number}. {alert.severity}: {alert.rule} in {listing(alert.sites or (alert.layer,))}",
                f"   since step {alert.step} ({end}{back})",
                f"   {alert.message}",
                f"   Try: {alert.remedy}",
                *(f"   {kept}" for kept in alert.kept),
            ]
        lines += _untrained_lines(self.untrained)
        lines += [f"Intervention: {told}" for told in self.interventions]
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
