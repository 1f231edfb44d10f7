"""What ranks have learned from their exchanges, and act on before the same one: to stop, and to look more closely."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gradwatch.measure.device_buffer import IN_FLIGHT
from gradwatch.measure.shard_exchange import ShardBlock

EXCHANGES_UNDER_WAY = IN_FLIGHT + 2
"""Exchanges that may be under way when the next begins, where there is one at every step: no rank waits for the device,
and by then every rank has judged the steps before. Between exchanges of many steps there is time for that."""


class RankAgreement:
    """Counts the exchanges, which all ranks begin alike, also one on which GradWatch has failed."""

    def __init__(self, exchanged: deque[ShardBlock], errors: Sequence[Exception]) -> None:
        """`exchanged`: the reader's exchanges that were not checked. `errors`: of this rank."""
        self._exchanged, self._errors = exchanged, errors
        self.lag = EXCHANGES_UNDER_WAY
        self.count = 0
        """Exchanges so far; the number of the one to come."""
        self.over = False
        """Whether no rank enters another one."""
        self._closely_from: int | None = None

    def check(self) -> None:
        """Raise, on all ranks before the same exchange, where one was in trouble at an earlier one: it is `over`."""
        while len(self._exchanged) > self.lag:
            if self._exchanged.popleft().trouble:
                self.over = True
                raise self._errors[0] if self._errors else RuntimeError("something failed on another rank")

    def begin(self) -> bool:
        """An exchange begins. Whether all ranks read the gradients again after the steps of the one to come."""
        self.count += 1
        return self._closely_from is not None and self.count >= self._closely_from

    def look_closely(self, exchange: int) -> None:
        """A sample in the exchange of that number has shown that the gradients change after they were measured.

        A rank that has failed since does not learn of it: ranks wait until all have stopped because of that.
        """
        if self._closely_from is None:
            self._closely_from = exchange + 2 * (self.lag + 1)
