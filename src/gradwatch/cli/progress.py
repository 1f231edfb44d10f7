"""A bar for a read that takes its time: on stderr, and only where a person looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def reading(path: Path) -> Iterator[Callable[[int, int], None] | None]:
    """Gives what a reader calls with the bytes it has read and all there are; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading {task.description}", markup=False), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(path.name)
        yield lambda done, total: bar.update(task, completed=done, total=total)
