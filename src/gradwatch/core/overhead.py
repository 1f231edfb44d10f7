"""Measures the share of the training time that GradWatch takes. No decision depends on it."""

from __future__ import annotations

from time import perf_counter


class Overhead:
    """Counts seconds of training and of GradWatch. Validation and waiting for data do not count as training."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds spent in GradWatch."""
        self.started: float | None = None
        """When the training that is under way began, as `perf_counter` gives it; None in validation and the like."""
        self._training_seconds = 0.0

    @property
    def training_seconds(self) -> float:
        """Seconds of training, with those of GradWatch."""
        return self._training_seconds + (0.0 if self.started is None else perf_counter() - self.started)

    @property
    def share(self) -> float:
        """The share of the training time that GradWatch takes, 0 to 1."""
        training = self.training_seconds
        return min(1.0, self.seconds / training) if training > 0 else 0.0

    def stop(self) -> None:
        """Count no training time until `started` is set again."""
        if self.started is not None:
            self._training_seconds += perf_counter() - self.started
        self.started = None

    def add(self, since: float) -> None:
        """Count the time since `since` as GradWatch's, and also as training time while that is stopped."""
        seconds = perf_counter() - since
        self.seconds += seconds
        if self.started is None:
            self._training_seconds += seconds
