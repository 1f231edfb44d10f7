"""`gradwatch top`: a run on the terminal's screen, drawn anew as it goes on."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.cli.command import OK, help_text
from gradwatch.core.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

SECONDS = 1.0
"""Seconds between two looks at the files."""

REST = 4.0
"""Times that reading took, which are waited at least: a long run is read less often."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="a run on the screen, live: verdict, map, loss and the worst layers",
        **help_text(
            "Show a run on the terminal: its verdict, a map of the gradient norms (layers from top to bottom, steps "
            "from left to right), the loss, and the layers that are worst. A run under way is followed by its file on "
            "this machine until it ends, or until Ctrl-C. Where the output is no terminal it is shown once.",
            examples={
                "gradwatch top lightning_logs/version_3": "the run there",
                "gradwatch top lightning_logs --once": "the latest run below a folder, once",
            },
            exits={"0": "it was shown", "2": "there is no such run, or it cannot be read"},
            more="`gradwatch ls` lists the runs.",
        ),
    )
    parser.add_argument(
        "path",
        metavar="RUN",
        type=Path,
        help="the run's log directory, its event file, or a folder: the latest below it",
    )
    parser.add_argument("--once", action="store_true", help="show it once, and leave it on the screen")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    path = _latest(options.path)
    if options.once or not console.is_terminal:
        _show_once(console, path)
    else:
        _follow(console, path)
    return OK


def _latest(path: Path) -> Path:
    """The run at `path`; of several below it the one that was written last."""
    from gradwatch.runs.files import runs_at

    return max(runs_at(path), key=_written, default=path)


def _written(folder: Path) -> float:
    return max((file.stat().st_mtime for file in _event_files(folder)), default=0.0)


def _event_files(path: Path) -> list[Path]:
    """The event files of the run at `path`."""
    from gradwatch.runs.files import event_files
    from gradwatch.sinks.record.record_format import FOLDER

    return [path] if path.is_file() else [file for own in (path, path / FOLDER) for file in event_files(own)]


def _show_once(console: Console, path: Path) -> None:
    from gradwatch.runs.report.run_data import read_run_data
    from gradwatch.runs.terminal_view import view

    coloured = console.color_system is not None and not console.no_color
    ascii_only = console.options.ascii_only
    data = read_run_data(path)
    screen = view(data, name=str(path), width=console.width, height=40, colours=coloured, ascii_only=ascii_only)
    with console.capture() as shown:
        console.print(screen, soft_wrap=True)
    print("\n".join(line.rstrip() for line in shown.get().splitlines()))


def _follow(console: Console, path: Path) -> None:
    """Draw until the run has ended, or Ctrl-C; what was drawn last stays."""
    from rich.live import Live

    from gradwatch.runs.files import Unreadable
    from gradwatch.runs.report.run_data import read_run_data
    from gradwatch.runs.terminal_view import view

    data, known, size = read_run_data(path), _state(path), console.size
    coloured = not console.no_color

    def screen(free: int = 1) -> Any:
        """`free`: lines of the terminal that are left."""
        return view(data, name=str(path), width=console.width, height=console.height - free, colours=coloured)

    with Live(screen(), console=console, auto_refresh=False, screen=True) as live:
        live.refresh()
        with suppress(KeyboardInterrupt):
            while not data.verdict.ended:
                time.sleep(SECONDS)
                now = _state(path)
                if now != known:
                    began = time.monotonic()
                    try:
                        data, known = read_run_data(path), now
                    except (Unreadable, OSError):  # it is being written, or was moved: what is known stays
                        continue
                    live.update(screen(), refresh=True)
                    time.sleep(max(0.0, REST * (time.monotonic() - began) - SECONDS))
                elif console.size != size:
                    size = console.size
                    live.update(screen(), refresh=True)
    console.print(screen(2), soft_wrap=True)  # and the path, and the prompt
    print(printable(path))


def _state(path: Path) -> list[tuple[str, int]]:
    """What tells that a run has gone on: the sizes of its files."""
    return [(file.name, file.stat().st_size) for file in _event_files(path)]
