"""Where incidents stand on the x-axis of the logs, which need not count optimizer steps as they do."""

from __future__ import annotations

from collections.abc import Iterable

from gradwatch.core.alert import Alert

Key = tuple[str, int]
"""An incident: its rule and the step it began."""

Span = tuple[int | None, int | None]
"""Where it begins and ends on the x-axis; None where it is open, or that is not known."""


class IncidentSpans:
    """Hears of steps and alerts in their order, and places the ones among the others."""

    def __init__(self) -> None:
        self.alerts: dict[Key, Alert] = {}
        """Every incident so far, as it stands."""
        self.spans: dict[Key, Span] = {}
        self._unplaced: set[Key] = set()
        """Those whose step is still to come: alerts are told before the record that they are about."""
        self._step, self._axis = -1, 0

    def advance(self, step: int, axis: int) -> None:
        """The record of optimizer step `step`, at `axis`, is there."""
        self._step, self._axis = step, axis
        if self._unplaced:
            self._place(step)

    def update(self, alert: Alert) -> None:
        """An incident was opened, changed or closed; one that is heard of first at its end began in another session."""
        key = alert.rule, alert.step
        if key not in self.alerts and alert.closed_step is None:
            self._unplaced.add(key)
            if alert.step == self._step:
                self._place(alert.step)
        begun, over = self.spans.get(key, (None, None))
        if alert.closed_step is None:
            over = None
        elif over is None and begun is not None:
            # between its beginning and now the x-axis ran as evenly as the optimizer steps
            pace = (self._axis - begun) / max(1, self._step - alert.step)
            over = begun + round(pace * (alert.closed_step - alert.step))
        self.alerts[key], self.spans[key] = alert, (begun, over)

    def finish(self, alerts: Iterable[Alert]) -> None:
        """No record is to come, and `alerts` are all there were: of those never heard of, nothing happened here."""
        if self._unplaced:
            self._place(max(step for _, step in self._unplaced))
        for alert in alerts:
            if (alert.rule, alert.step) in self.alerts:
                self.update(alert)
            else:
                self.alerts[alert.rule, alert.step], self.spans[alert.rule, alert.step] = alert, (None, None)

    def _place(self, step: int) -> None:
        for key in [key for key in self._unplaced if key[1] <= step]:
            self._unplaced.remove(key)
            self.spans[key] = self._axis, None
