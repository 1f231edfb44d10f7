"""Python's collector of reference cycles is paused where hooks make thousands of objects at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

PAUSED = 2**31 - 1
"""The first threshold while it is paused: objects made before it looks at the young ones. No training reaches it, and
no one else sets it, so that `gc.disable` and thresholds of the user's own stay in force.
"""


@contextmanager
def no_collections() -> Iterator[None]:
    """Within it the collector is paused, unless it is off or paused already.

    Every hook on a module, and every node of the graph that it reaches, is a few objects. At thousands of modules the
    collector would go through the whole model again and again: half of what hooks cost there (measured).
    """
    first, *others = gc.get_threshold()
    if first in (0, PAUSED):
        yield
        return
    gc.set_threshold(PAUSED, *others)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == PAUSED:  # otherwise somebody has set others since
            gc.set_threshold(first, *others)
