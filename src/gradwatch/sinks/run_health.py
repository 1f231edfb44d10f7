"""Health of a run in a line, from its incidents that count."""

from __future__ import annotations

from collections.abc import Iterable

from gradwatch.core.alert import Alert, Verdict, health_of, serious

NOTHING_FOUND = {
    "unmeasured": "No step was measured",
    "no end": "Nothing found so far",
    "gradwatch failed": "Nothing found before GradWatch failed",
    "stuck": "Nothing found; {stuck}",
    "healthy": "Healthy",
}
"""What `health_of` says of a run without a warning or an error, in words."""


def under_way(alerts: Iterable[Alert]) -> Verdict:
    """The verdict of a run that goes on, with the `alerts` so far."""
    return Verdict(tuple(alerts), 0, 0, 0.0, {}, ended=False)


def status(verdict: Verdict) -> str:
    """One line: 'Warning: vanishing in a, b, since step 3; 1 more incident'."""
    found = serious(verdict.incidents)
    if not found:
        return NOTHING_FOUND[health_of(verdict)].format(stuck=verdict.stuck)
    worst, more = found[0], len(found) - 1
    rest = f"; {more} more incident{'s' * (more > 1)}" if more else ""
    return f"{str(worst.severity).capitalize()}: {worst.rule} in {worst.where}, {worst.since}{rest}"
