"""A run in one line: healthy or not, and where."""

from __future__ import annotations

from collections.abc import Iterable

from gradwatch.core.alert import Alert, Severity, ranked


def status(alerts: Iterable[Alert], *, ended: bool, stuck: str = "") -> str:
    """One line: 'Warning: vanishing in a, b, since step 3; 1 more incident'. `stuck`: as of a verdict."""
    loud = [alert for alert in ranked(alerts) if alert.severity is not Severity.NOTICE]
    if not loud:
        return "Nothing found so far" if not ended else f"Nothing found; {stuck}" if stuck else "Healthy"
    worst, more = loud[0], len(loud) - 1
    rest = f"; {more} more incident{'s' * (more > 1)}" if more else ""
    return f"{str(worst.severity).capitalize()}: {worst.rule} in {worst.where}, {worst.since}{rest}"
