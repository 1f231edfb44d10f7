"""`gradwatch ls`: the runs below a folder, one a line."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradwatch.cli.command import OK, complain, help_text
from gradwatch.core.printable import printable

UNWRAPPED_WIDTH = 10_000
"""Columns outside terminals: a path in a pipe or file is not wrapped."""

NARROW_WIDTH = 60
"""Terminal columns below which the time of a run is not shown. Judgement."""

MAX_FAULTS = 12
"""Rules that are named of a run, at most. Judgement."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "ls",
        help="list the recorded runs below a folder",
        **help_text(
            "List the runs below a folder: how far each came, the worst of its alerts, all of them, and when it began. "
            "A run that has no end was cut off, or is still under way.",
            examples={
                "gradwatch ls": "the runs below this folder",
                "gradwatch ls lightning_logs": "those below another",
            },
            exits={"0": "also where there is no run", "2": "there is no such folder"},
            more="`gradwatch report RUN` shows one run, `gradwatch compare A B` compares two.",
        ),
    )
    parser.add_argument(
        "folder", metavar="DIR", type=Path, nargs="?", default=Path("."), help="where to look (default: here)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import os

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gradwatch.core.alert import health_of, serious
    from gradwatch.runs.files import Unreadable, runs_below
    from gradwatch.runs.names import time_text
    from gradwatch.runs.reader import read_run
    from gradwatch.sinks.terminal.console import STYLES

    folder: Path = options.folder
    if not folder.is_dir():
        return complain("ls", f"there is no folder {folder}")
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNWRAPPED_WIDTH
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("alerts", overflow="fold")
    if console.width >= NARROW_WIDTH:
        table.add_column("began", no_wrap=True)
    styles = {str(severity): style for severity, style in STYLES.items()} | {"healthy": "green"}
    unread = []
    for place in runs_below(folder):
        try:
            run = read_run(place)
        except (Unreadable, OSError) as error:
            unread.append(str(error))
            continue
        name = str(place.relative_to(folder)) if place != folder else "."
        incidents = run.verdict.incidents
        health = health_of(replace(run.verdict, ended=True))
        end = "" if run.finished is not None else ", no end"
        state = Text(f"{health}{end}", style=styles.get(health, ""))
        rules = [*dict.fromkeys(alert.rule for alert in serious(incidents))]
        more = " ..." * (len(rules) > MAX_FAULTS)
        alerts = Text(printable(", ".join(rules[:MAX_FAULTS]) or "-") + more)
        steps = f"{run.verdict.run_steps or run.verdict.steps:,}"
        cells = [Text(printable(name)), Text(steps), state, alerts, Text(time_text(run.began))]
        table.add_row(*cells[: len(table.columns)])
    for message in unread:
        complain("ls", message)
    if table.row_count:
        with console.capture() as shown:
            console.print(table)
        print(shown.get(), end="")
    else:
        print(f"there is no recorded run below {printable(folder)}")
    return OK
