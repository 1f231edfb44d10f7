"""What the commands share: exit codes, the line of an error, the texts of `--help`, and a progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

from gradwatch.core.printable import printable

OK, ALERTS, MISUSE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes; the last is a shell's for Ctrl-C, 128 + SIGINT."""

WIDTH = 79
"""Columns of a line of help."""


def complain(command: str, message: object) -> int:
    """Print one line on stderr; returns the exit code of misuse."""
    print(f"gradwatch {command}: {printable(message)}", file=sys.stderr)
    return MISUSE


def write_page(command: str, out: Path, html: str) -> int:
    """Write `html` to `out`, whole or not at all; returns the exit code, and says why where that is not `OK`."""
    from gradwatch.runs.pages import write

    if out.is_dir():
        return complain(command, f"cannot write {out}: it is a folder")
    try:
        write(out, html)
    except OSError as error:
        return complain(command, f"cannot write {out}: {error.strerror}")
    return OK


def help_text(
    description: str, *, examples: Mapping[str, str], exits: Mapping[str, str], more: str = ""
) -> dict[str, Any]:
    """The arguments of `add_parser` that make the help text.

    `examples`: command -> its purpose; `exits`: exit code -> its meaning, but for that of Ctrl-C, which is added.
    """
    exits = {**exits, str(INTERRUPTED): "interrupted with Ctrl-C"}
    parts = [fill(more, WIDTH)] if more else []
    # what to type stands on a line of its own, to be copied
    shown = "\n".join(f"  {command}\n      {purpose}" for command, purpose in examples.items())
    parts.append(f"examples:\n{shown}")
    codes = "\n".join(
        fill(meaning, WIDTH, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7)
        for code, meaning in exits.items()
    )
    parts.append(f"exit codes:\n{codes}")
    return {
        "description": fill(description, WIDTH),
        "epilog": "\n\n".join(parts),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


@contextmanager
def reading(path: Path) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on stderr during a long read.

    Yields a function of (bytes read, bytes in all), or None where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading {task.description}", markup=False), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(printable(path.name))
        yield lambda done, total: bar.update(task, completed=done, total=total)
