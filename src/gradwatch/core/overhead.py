"""Measures the share of the training time that GradWatch takes. No decision depends on it."""

from __future__ import annotations

from time import perf_counter


class Overhead:
    """Counts seconds of training and of GradWatch. Validation and waiting for data do not count as training."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds spent in GradWatch."""
        self.training_seconds = 0.0
        """Seconds of training, with those of GradWatch."""
        self._clock = 0.0
        self._running = False

    @property
    def share(self) -> float:
        """The share of the training time that GradWatch takes, 0 to 1."""
        return min(1.0, self.seconds / self.training_seconds) if self.training_seconds > 0 else 0.0

    def start(self) -> float:
        """Start to count training time; returns the present time in seconds."""
        self._clock, self._running = perf_counter(), True
        return self._clock

    def lap(self) -> float:
        """Count the training time up to now, and go on; returns the present time in seconds."""
        now = perf_counter()
        if self._running:
            self.training_seconds += now - self._clock
        self._clock = now
        return now

    def stop(self) -> None:
        """Count the training time up to now, and stop until `start`."""
        if self._running:
            self.training_seconds += perf_counter() - self._clock
        self._running = False

    def add(self, since: float) -> None:
        """Count the time since `since` as GradWatch's, and also as training time while that is stopped."""
        seconds = perf_counter() - since
        self.seconds += seconds
        if not self._running:
            self.training_seconds += seconds
