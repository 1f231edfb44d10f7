"""What is to be done with numbers once they have landed: a queue in the order of the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from gradwatch.measure.device_buffer import HostCopy

IN_FLIGHT = 16
"""Parcels under way from the device before the oldest is waited for. Judgement."""


class CopyQueue:
    """Actions, each waiting for its parcels and for all actions before it. On the CPU nothing ever waits."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Sequence[HostCopy], Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def then(self, action: Callable[[], None], *host_copies: HostCopy) -> None:
        """Do `action` when `host_copies` have landed."""
        self._queue.append((host_copies, action))

    def proceed(self, *, wait: bool = False) -> None:
        """Do what can be done without waiting for the device, or everything."""
        while self._queue:
            host_copies, action = self._queue[0]
            if not (wait or len(self._queue) > IN_FLIGHT or all(host_copy.done for host_copy in host_copies)):
                return
            self._queue.popleft()
            action()

    def cancel(self) -> None:
        self._queue.clear()
