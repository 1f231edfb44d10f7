"""`gradwatch report`: the report of a run from its record, as a page, for programs, or as a card."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from gradwatch.cli.command import OK, complain, help_text, reading, write_page
from gradwatch.core.printable import printable


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="make the report of a run from its record, also of one that crashed or is still under way",
        **help_text(
            "Read the record that a run left on disk and write its report: one HTML file that needs nothing but "
            "itself, with the verdict first, then where and when, the alerts with cause and remedy, and every layer. "
            "A run that was killed is there up to its last second; what is damaged is left out, and said. "
            "With --format, the same for programs and language models in at most 64 kB.",
            examples={
                "gradwatch report lightning_logs/version_3": "writes gradwatch_report.html into that folder",
                "gradwatch report runs/today -o today.html": "writes it elsewhere",
                "gradwatch report lightning_logs": "one page of all runs below that folder: gradwatch_runs.html",
                "gradwatch report runs/today --card card.svg": "writes a picture for an issue or a chat too",
                "gradwatch report runs/today --format md": "prints a summary, to paste or to pipe",
            },
            exits={"0": "it is written", "2": "there is no such run, or it cannot be read, or the page not written"},
            more="`gradwatch ls` lists the runs.",
        ),
    )
    parser.add_argument(
        "path", metavar="RUN", type=Path, help="the run's log directory, its event file, or a folder of runs"
    )
    parser.add_argument(
        "--format",
        choices=("html", "json", "md"),
        default="html",
        help="html: the page; json, md: a summary, printed unless -o is given",
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        type=Path,
        help="where to write it (default: gradwatch_report.html in the run's folder)",
    )
    parser.add_argument(
        "--card", metavar="FILE.svg", type=Path, help="write a picture of the verdict, map and loss too: SVG"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.format != "html" and options.card is not None:
        return complain("report", "a card is written beside the page: leave out --format, or --card")
    if options.format != "html":
        return _summary(options)
    return _pages(options) if _several(options.path) else _page(options)


def _several(path: Path) -> bool:
    """Whether there is more than one run below `path`, and none in it."""
    from gradwatch.runs.files import runs_at

    return len(list(islice(runs_at(path), 2))) > 1


def _pages(options: argparse.Namespace) -> int:
    """One page of all runs below a folder."""
    from gradwatch.runs.files import Unreadable, runs_below
    from gradwatch.runs.names import counted
    from gradwatch.runs.report.many import PAGE_NAME, line_of, page_of_many
    from gradwatch.runs.report.run_data import read_run_data

    path: Path = options.path
    if options.card is not None:
        return complain("report", f"there are several runs below {path}: a card is of one")
    out: Path = options.out or path
    if out.is_dir():
        out = out / PAGE_NAME
    lines, notes = [], []
    for place in runs_below(path):
        try:
            with reading(place) as progress:
                data = read_run_data(place, progress=progress)
        except (Unreadable, OSError) as error:
            notes.append(str(error))
            continue
        lines.append(line_of(data, place, str(place.relative_to(path))))
    if not lines:
        raise Unreadable(f"no run below {path} can be read: {'; '.join(notes[:3])}")
    if code := write_page("report", out, page_of_many(lines, out=out, source=str(path), notes=notes)):
        return code
    for note in notes:
        print(f"Note: {printable(note)}")
    unhealthy = sum(line.health in ("error", "warning") for line in lines)
    print(f"GradWatch: {counted(len(lines), 'run')}, {unhealthy} with incidents")
    print(printable(out))
    return OK


def _page(options: argparse.Namespace) -> int:
    from gradwatch.runs.report.card import card
    from gradwatch.runs.report.page import page
    from gradwatch.runs.report.run_data import read_run_data
    from gradwatch.runs.report.sink import NAME

    path: Path = options.path
    if options.card is not None and options.card.suffix.lower() != ".svg":
        return complain("report", f"a card is an SVG picture, such as card.svg, and not {options.card}")
    out: Path = options.out or _folder(path)
    if out.is_dir():
        out = out / NAME
    with reading(path) as progress:
        data = read_run_data(path, progress=progress)
    if options.card is not None and (code := write_page("report", options.card, card(data, source=path.name))):
        return code
    if code := write_page("report", out, page(data, source=str(path))):
        return code
    for note in data.notes:
        print(f"Note: {printable(note)}")
    print(data.verdict.lines[0])
    print(printable(out))
    if options.card is not None:
        print(printable(options.card))
    return OK


def _folder(path: Path) -> Path:
    """The folder of the run at `path`, or of the only one below it."""
    from gradwatch.runs.files import runs_at

    run = next(runs_at(path), path)
    return run if run.is_dir() else run.parent


def _summary(options: argparse.Namespace) -> int:
    from gradwatch.runs.arrays import read
    from gradwatch.runs.summary.document import STATISTICS, document, encoded
    from gradwatch.runs.summary.markdown import markdown

    with reading(options.path) as progress:
        found = document(read(options.path, statistics=STATISTICS, progress=progress))
    text = f"{encoded(found)}\n" if options.format == "json" else markdown(found)
    if options.out is None:
        print(text, end="")
        return OK
    code = write_page("report", options.out, text)
    if code == OK:
        print(printable(options.out))
    return code
