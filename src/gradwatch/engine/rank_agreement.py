"""What ranks agree on in their exchange at every step: when to stop it, and when to read gradients again."""

from __future__ import annotations

from gradwatch.engine.pending_actions import IN_FLIGHT


class RankAgreement:
    """What one rank learns from an exchange, all others know `IN_FLIGHT` steps later; ranks act on it only then."""

    def __init__(self) -> None:
        self.reason: Exception | None = None
        """Why all ranks stop exchanging, once one has to."""
        self.edited = False
        """Whether a sampled step has shown that gradients change after the measurement."""
        self._leave_at = self._closely_from = 0

    def leave(self, step_count: int, reason: Exception) -> None:
        """One rank has reported in the exchange of step `step_count` that it must stop; the first reason is kept."""
        if self.reason is None:
            self.reason, self._leave_at = reason, step_count + IN_FLIGHT

    def end(self, reason: Exception) -> None:
        """The training is over: ranks stop exchanging at once."""
        self.reason, self._leave_at = self.reason or reason, -1

    def over(self, step_count: int) -> bool:
        """Whether all ranks have stopped by step `step_count`."""
        return self.reason is not None and step_count >= self._leave_at

    def check(self, step_count: int) -> None:
        """Raise the reason once all ranks have stopped."""
        if self.reason is not None and self.over(step_count):
            raise self.reason

    def look_closely(self, step_count: int) -> None:
        """A sample at step `step_count` has shown a change of the gradients that is not seen between samples.

        A rank that has failed since does not learn of it, so ranks wait until all would have stopped for that failure.
        """
        if not self.edited:
            self.edited, self._closely_from = True, step_count + 2 * (IN_FLIGHT + 1)

    def closely(self, step_count: int) -> bool:
        """Whether all ranks read the gradients again after step `step_count`."""
        return self.edited and step_count >= self._closely_from
