"""A queue of actions on numbers that are being copied to the host, in the order of the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from gradwatch.measure.device_buffer import HostCopy

IN_FLIGHT = 16
"""Steps for which a copy from the device may be in flight before it is waited for. Judgement."""


class PendingActions:
    """Actions, each of which waits for its copies and for all actions before it. On the CPU no action waits."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Sequence[HostCopy], Callable[[], None]]] = deque()
        self._steps = 0

    def __len__(self) -> int:
        return len(self._queue)

    def then(self, action: Callable[[], None], *host_copies: HostCopy) -> None:
        """Call `action` when `host_copies` have arrived."""
        self._queue.append((self._steps, host_copies, action))

    def begin_step(self) -> None:
        """A step begins: actions wait for a number of steps at most."""
        self._steps += 1

    def proceed(self, *, wait: bool = False) -> None:
        """Run the actions that need not wait for the device, or all of them with `wait`."""
        while self._queue:
            since, host_copies, action = self._queue[0]
            late = self._steps - since > IN_FLIGHT
            if not (wait or late or all(host_copy.done for host_copy in host_copies)):
                return
            self._queue.popleft()
            action()

    def cancel(self) -> None:
        self._queue.clear()
