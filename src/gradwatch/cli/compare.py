"""`gradwatch compare`: the first layer and step at which two runs diverge."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwatch.cli.command import OK, help_text, reading, write_page
from gradwatch.core.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from gradwatch.runs.compare.comparison import Comparison

MAX_ROWS = 12
"""Layers and alerts that the terminal lists at most; the page has all layers. Judgement: half a screen."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="the first layer and step at which two runs diverge",
        **help_text(
            "Read the records of two runs and say where they diverge: the first step and layer at which weights, "
            "gradients or updates are further apart than the noise of either run, and than a factor of two. Two runs "
            "that only have other seeds seldom do. Of runs that begin as one, also the step at which they stop being "
            "the same, and where their learning rates diverge. Layers of different models are compared by their names.",
            examples={
                "gradwatch compare lightning_logs/version_3 lightning_logs/version_4": "what became different",
                "gradwatch compare runs/good runs/bad -o diverged.html": "with pictures: a page for any browser",
            },
            exits={
                "0": "they were compared, whatever came of it",
                "2": "one of them cannot be read, or they have nothing in common",
            },
            more="`gradwatch ls` lists the runs.",
        ),
    )
    parser.add_argument("a", metavar="A", type=Path, help="a run's log directory, or its event file")
    parser.add_argument("b", metavar="B", type=Path, help="another")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write a page with pictures too: HTML")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from gradwatch.runs.arrays import read
    from gradwatch.runs.compare.aligned import COMPARED
    from gradwatch.runs.compare.comparison import compare_runs
    from gradwatch.runs.compare.page import NAME, page

    runs = []
    for path in (options.a, options.b):
        with reading(path) as progress:
            runs.append(read(path, statistics=COMPARED, progress=progress))
    result = compare_runs(runs[0], runs[1])
    console = Console(highlight=False)
    with console.capture() as shown:
        _show(console, result)
    if options.out is None:
        print(shown.get(), end="")
        return OK
    out: Path = options.out / NAME if options.out.is_dir() else options.out
    code = write_page("compare", out, page(result))
    print(shown.get(), end="")
    if code == OK:
        print(printable(out))
    return code


def _show(console: Console, result: Comparison) -> None:
    from rich.table import Table
    from rich.text import Text

    from gradwatch.core.alert import serious
    from gradwatch.runs.compare.comparison import WORDS, format_ratio, format_size
    from gradwatch.runs.names import counted, with_short_names
    from gradwatch.sinks.terminal.layer_table import shorten_name

    def text(content: object, style: str = "") -> Text:
        return Text(printable(content), style=style)

    for letter, record in zip("AB", result.runs, strict=True):
        name = record.path.name if console.width < 80 else str(record.path)
        first = record.verdict.lines[0].removeprefix("GradWatch: ")
        console.print(text(f"{letter}  {name}: {first}", "dim"), soft_wrap=False)
        for note in record.notes:
            console.print(text(f"   Note: {note}", "dim"))
    console.print()
    console.print(text(result.headline, "bold yellow" if result.divergence_points else "bold"))
    for sentence in result.sentences:
        console.print(text(sentence))
    if result.divergence_points:
        longest = max(5, console.width - 46)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("layer", no_wrap=True)
        table.add_column("what", no_wrap=True)
        for name in ("A", "B", "B/A"):
            table.add_column(name, justify="right", no_wrap=True)
        for point in result.divergence_points[:MAX_ROWS]:
            a, b = point.values
            ratio = format_ratio(b - a) or "-"
            name = shorten_name(result.pair.layers[point.layer], longest)
            cells = (str(point.step), name, WORDS[point.statistic].split()[0], format_size(a), format_size(b), ratio)
            table.add_row(*(text(cell) for cell in cells))
        console.print()
        console.print(table)
        if len(result.divergence_points) > MAX_ROWS:
            console.print(
                text(
                    f"and {counted(len(result.divergence_points) - MAX_ROWS, 'more layer')}; -o FILE lists them", "dim"
                )
            )
    for letter, record in zip("AB", result.runs, strict=True):
        alerts = serious(record.verdict.incidents)
        for alert in alerts[:MAX_ROWS]:
            console.print(text(f"Alert of {letter}: {alert.rule} in {with_short_names(alert).where} {alert.since}"))
        if len(alerts) > MAX_ROWS:
            console.print(text(f"and {counted(len(alerts) - MAX_ROWS, 'more alert')} of {letter}", "dim"))
