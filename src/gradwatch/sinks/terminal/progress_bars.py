"""Prints whole lines on a terminal with a progress bar."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO


@contextmanager
def preserve_bars(logger: logging.Logger | None = None) -> Iterator[None]:
    """A context in which lines written to `sys.stdout`, `sys.stderr` and by `logger` do not break progress bars.

    tqdm's bars are cleared and drawn again. A live display of rich needs lines to pass through its proxies of
    `sys.stdout` and `sys.stderr`, so handlers with the real streams get the proxies during the context.
    """
    with ExitStack() as stack:
        # without an import of tqdm there is no bar; its classes share one list of bars
        tqdm = sys.modules.get("tqdm.std")
        if tqdm is not None:
            stack.enter_context(tqdm.tqdm.external_write_mode())
        if logger is not None:
            for handler, stand_in in _bypassing(logger):
                stack.callback(handler.setStream, handler.stream)
                handler.setStream(stand_in)
        yield


def print_whole(text: str) -> None:
    """Print `text` without breaking progress bars. Characters that `sys.stdout` cannot encode are escaped.

    Does nothing where `sys.stdout` cannot be written to (`pythonw`, a closed pipe).
    """
    encoding = getattr(sys.stdout, "encoding", None)  # some replacements of `sys.stdout` have none
    if encoding is not None:
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        with preserve_bars():
            sys.stdout.write(text)
            sys.stdout.flush()
    except Exception as error:
        logging.getLogger("gradwatch").debug("sys.stdout takes no text", exc_info=error)


def _bypassing(logger: logging.Logger) -> list[tuple[logging.StreamHandler[TextIO], TextIO]]:
    """The handlers of `logger` that bypass rich's live display, each with the display's proxy of its stream."""
    # handlers of redirected streams are left alone: the bar is not on those
    stand_ins = {
        id(stream.rich_proxied_file): stream  # type: ignore[union-attr]
        for stream in (sys.stdout, sys.stderr)
        if type(stream).__name__ == "FileProxy" and stream.isatty()
    }
    return [
        (handler, stand_ins[id(handler.stream)])
        for handler in handlers_of(logger)
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in stand_ins
    ]


def handlers_of(logger: logging.Logger) -> Iterator[logging.Handler]:
    """The handlers that get what `logger` logs."""
    node: logging.Logger | None = logger
    while node is not None:
        yield from node.handlers
        node = node.parent if node.propagate else None
