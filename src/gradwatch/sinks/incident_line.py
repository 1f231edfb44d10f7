"""The incidents that count, and a run in one line: healthy or not, and where."""

from __future__ import annotations

from collections.abc import Iterable

from gradwatch.core.alert import Alert, Severity, ranked


def loud(alerts: Iterable[Alert]) -> list[Alert]:
    """The warnings and errors, worst first."""
    return [alert for alert in ranked(alerts) if alert.severity is not Severity.NOTICE]


def status(alerts: Iterable[Alert], *, ended: bool, stuck: str = "") -> str:
    """One line: 'Warning: vanishing in a, b, since step 3; 1 more incident'. `stuck`: as of a verdict."""
    found = loud(alerts)
    if not found:
        return "Nothing found so far" if not ended else f"Nothing found; {stuck}" if stuck else "Healthy"
    worst, more = found[0], len(found) - 1
    rest = f"; {more} more incident{'s' * (more > 1)}" if more else ""
    return f"{str(worst.severity).capitalize()}: {worst.rule} in {worst.where}, {worst.since}{rest}"
