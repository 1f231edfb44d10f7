"""What an alert does to the training, as the user chose with `on_alert`."""

from __future__ import annotations

import logging

from gradwatch.core.alert import Alert
from gradwatch.engine.options import OnAlert
from gradwatch.sinks.terminal.progress_bars import preserve_bars

logger = logging.getLogger("gradwatch")


class AlertReaction:
    """Stores that the training is to end, or calls the user's function; an error in that function does not end it."""

    def __init__(self, on_alert: OnAlert) -> None:
        self._on_alert = on_alert
        self.stopped: Alert | str | None = None
        """Why the training is to end: the first alert, with `on_alert="stop"`, or an intervention's reason."""
        self.raised: Alert | None = None
        """`on_alert="raise"`: the first alert."""

    def end(self, why: str) -> None:
        """An intervention ends the training."""
        self.stopped = self.stopped or why

    def __call__(self, alert: Alert) -> None:
        if self._on_alert == "raise":
            self.raised = self.raised or alert
        elif self._on_alert == "stop":
            self.stopped = self.stopped or alert
        elif callable(self._on_alert):
            try:
                self._on_alert(alert)
            except Exception as error:
                with preserve_bars(logger):
                    logger.warning("GradWatch: on_alert failed: %s: %s", type(error).__name__, error)
                logger.debug("traceback of on_alert", exc_info=error)
