"""The incidents that count, and a run in one word and in one line: healthy or not, and where."""

from __future__ import annotations

from collections.abc import Iterable

from gradwatch.core.alert import Alert, Severity, Verdict, ranked

NOTHING_FOUND = {
    "unmeasured": "No step was measured",
    "no end": "Nothing found so far",
    "stuck": "Nothing found; {stuck}",
    "healthy": "Healthy",
}
"""The health of a run without a warning or an error, in words."""


def loud(alerts: Iterable[Alert]) -> list[Alert]:
    """The warnings and errors, worst first."""
    return [alert for alert in ranked(alerts) if alert.severity is not Severity.NOTICE]


def health(severities: Iterable[Severity], *, ended: bool, steps: int = 1, stuck: str = "") -> str:
    """The worst of the severities above a notice; without one a key of `NOTHING_FOUND`. `steps`, `stuck`: as of a
    verdict.
    """
    worst = max(severities, key=lambda severity: severity.order, default=Severity.NOTICE)
    if worst is not Severity.NOTICE:
        return str(worst)
    return "unmeasured" if not steps else "no end" if not ended else "stuck" if stuck else "healthy"


def health_of(verdict: Verdict, *, ended: bool = True) -> str:
    """The health of the run with that verdict."""
    severities = (alert.severity for alert in verdict.incidents)
    return health(severities, ended=ended, steps=verdict.steps, stuck=verdict.stuck)


def status(alerts: Iterable[Alert], *, ended: bool, steps: int = 1, stuck: str = "") -> str:
    """One line: 'Warning: vanishing in a, b, since step 3; 1 more incident'. `steps`, `stuck`: as of a verdict."""
    found = loud(alerts)
    if not found:
        return NOTHING_FOUND[health((), ended=ended, steps=steps, stuck=stuck)].format(stuck=stuck)
    worst, more = found[0], len(found) - 1
    rest = f"; {more} more incident{'s' * (more > 1)}" if more else ""
    return f"{str(worst.severity).capitalize()}: {worst.rule} in {worst.where}, {worst.since}{rest}"
