"""What ranks agree on that wait for each other in every exchange: when to leave, and when to begin to look closely."""

from __future__ import annotations

from gradwatch.engine.copy_queue import IN_FLIGHT


class RankAgreement:
    """What one rank learns from an exchange, all others know `IN_FLIGHT` steps later: only then may any act on it."""

    def __init__(self) -> None:
        self.reason: Exception | None = None
        """Why all ranks leave, once one has to."""
        self.edited = False
        """Whether gradients were seen to change after the measurement in a way that only samples show."""
        self._leave_at = self._closely_from = 0

    def leave(self, step_count: int, reason: Exception) -> None:
        """One rank has told in the exchange of step `step_count` that it must go; the first reason stays."""
        if self.reason is None:
            self.reason, self._leave_at = reason, step_count + IN_FLIGHT

    def end(self, reason: Exception) -> None:
        """The training is over: nobody waits any more."""
        self.reason, self._leave_at = self.reason or reason, -1

    def over(self, step_count: int) -> bool:
        """Whether step `step_count` is the one at which all have gone."""
        return self.reason is not None and step_count >= self._leave_at

    def check(self, step_count: int) -> None:
        """Raise the reason at the step at which all have gone."""
        if self.reason is not None and self.over(step_count):
            raise self.reason

    def look_closely(self, step_count: int) -> None:
        """A sample at step `step_count` has shown what is between samples not seen.

        A rank that has failed meanwhile does not learn of it: so not before all would have left for that.
        """
        if not self.edited:
            self.edited, self._closely_from = True, step_count + 2 * (IN_FLIGHT + 1)

    def closely(self, step_count: int) -> bool:
        """Whether all ranks read the gradients again after step `step_count`."""
        return self.edited and step_count >= self._closely_from
