"""Ctrl-C waits while hooks are exchanged or removed, which takes a few milliseconds: it would leave some of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Within it a SIGINT waits: its handler, if it is written in Python, is called at the end.

    Signals are handled in the main thread; in others the context does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
