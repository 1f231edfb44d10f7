"""Where incidents stand on the x-axis of the logs, which need not count optimizer steps as they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert

Key = tuple[str, int]
"""An incident: its rule and the step it began."""

Span = tuple[int | None, int | None]
"""Where it begins and ends on the x-axis; None where it is open, or that is not known."""

POINTS = 2048
"""Steps whose place is kept at most, evenly: between two of them the x-axis ran as evenly as the steps. Judgement."""


class IncidentSpans:
    """Gets all steps and alerts, and places the ones among the others."""

    def __init__(self) -> None:
        self.alerts: dict[Key, Alert] = {}
        """Every incident so far, as it stands."""
        self._points: list[tuple[int, int]] = []
        """(step, its place on the x-axis) of every `_every`-th step."""
        self._every, self._steps = 1, 0
        self._last = -1, 0

    @property
    def spans(self) -> dict[Key, Span]:
        """Incident -> where it begins and ends. Of a step that is still to come the place is that of the last one."""
        steps, axis = np.array([*self._points, self._last]).T

        def place(step: int | None) -> int | None:
            if step is None or not self._points or step < steps[0]:  # the step of an earlier session
                return None
            return round(float(np.interp(step, steps, axis)))

        return {key: (place(alert.step), place(alert.closed_step)) for key, alert in self.alerts.items()}

    def extend(self, steps: Sequence[int] | NDArray[np.int64], axis: Sequence[int] | NDArray[np.int64]) -> None:
        """These steps were taken, at these places."""
        first = -self._steps % self._every
        every = slice(first, None, self._every)
        self._points += zip(map(int, steps[every]), map(int, axis[every]), strict=True)
        self._steps += len(steps)
        self._last = int(steps[-1]), int(axis[-1])
        while len(self._points) > POINTS:
            self._points, self._every = self._points[::2], 2 * self._every

    def update(self, alert: Alert) -> None:
        """An incident was opened, changed or closed."""
        self.alerts[alert.rule, alert.step] = alert

    def finish(self, alerts: Iterable[Alert]) -> None:
        """`alerts` are all there were."""
        self.alerts |= {(alert.rule, alert.step): alert for alert in alerts}
