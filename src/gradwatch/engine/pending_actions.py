"""A queue of actions on numbers that are being copied to the host, in the order of the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from gradwatch.measure.device_buffer import IN_FLIGHT, HostCopy

_DONE = attrgetter("done")


class PendingActions:
    """Actions, each of which waits for its copies and for all actions before it. On the CPU no action waits."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Sequence[HostCopy], Callable[[], None]]] = deque()
        """The step at which each began to wait, its copies, and the action."""
        self.steps = 0
        """Steps so far: actions wait for a number of steps at most."""

    def then(self, action: Callable[[], None], *host_copies: HostCopy) -> None:
        """Call `action` when `host_copies` have arrived."""
        self.waiting.append((self.steps, host_copies, action))

    def proceed(self, *, wait: bool = False) -> None:
        """Run the actions that need not wait for the device, or all of them with `wait`."""
        while self.waiting:
            since, host_copies, action = self.waiting[0]
            overdue = self.steps - since > IN_FLIGHT
            if not (wait or overdue or all(map(_DONE, host_copies))):
                return
            self.waiting.popleft()
            action()
