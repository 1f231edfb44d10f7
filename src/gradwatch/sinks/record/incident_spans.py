"""The positions of incidents on the x-axis of the Trainer's logs, which may differ from optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert

Key = tuple[str, int]
"""The key of an incident: its rule and its first step."""


class Span(NamedTuple):
    """Positions of an incident on the x-axis; None where the incident is open or the position unknown."""

    begin: int | None = None
    end: int | None = None
    noticed: int | None = None


MAX_POINTS = 2048
"""Steps with a stored position, at most, at equal distances; positions between them are interpolated. Judgement."""


class IncidentSpans:
    """Collects steps and alerts, and computes the alerts' positions on the x-axis."""

    def __init__(self) -> None:
        self.alerts: dict[Key, Alert] = {}
        """All incidents so far, in their present state."""
        self._points: list[tuple[int, int]] = []
        """(step, position on the x-axis) of every `_every`-th step."""
        self._every, self._steps = 1, 0
        self._last = -1, 0

    @property
    def spans(self) -> dict[Key, Span]:
        """Incident -> its span. A step that is still to come has the position of the last one."""
        steps, axis = np.array([*self._points, self._last]).T

        def place(step: int | None) -> int | None:
            if step is None or not self._points or step < steps[0]:  # the step of an earlier session
                return None
            return round(float(np.interp(step, steps, axis)))

        return {
            key: Span(place(alert.step), place(alert.closed_step), place(alert.noticed))
            for key, alert in self.alerts.items()
        }

    def extend(self, steps: Sequence[int] | NDArray[np.int64], axis: Sequence[int] | NDArray[np.int64]) -> None:
        """Add optimizer steps and their positions on the x-axis."""
        first = -self._steps % self._every
        every = slice(first, None, self._every)
        self._points += zip(np.asarray(steps)[every].tolist(), np.asarray(axis)[every].tolist(), strict=True)
        self._steps += len(steps)
        self._last = int(steps[-1]), int(axis[-1])
        while len(self._points) > MAX_POINTS:
            self._points, self._every = self._points[::2], 2 * self._every

    def update(self, alert: Alert) -> None:
        """An incident was opened, changed or closed."""
        self.alerts[alert.rule, alert.step] = alert

    def finish(self, alerts: Iterable[Alert]) -> None:
        """Add all `alerts` of the run in their final state."""
        self.alerts |= {(alert.rule, alert.step): alert for alert in alerts}
