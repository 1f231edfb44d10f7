"""`gradwatch report`: the report of a run from its record, as a page, for programs, or as a card."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gradwatch.cli.command import OK, complain, help_text, printable, reading, write_page


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="make the report of a run from its record, also of one that crashed or is still under way",
        **help_text(
            "Read the record that a run left on disk and write its report: one HTML file that needs nothing but "
            "itself, with the verdict first, then where and when, the alerts with cause and remedy, and every layer. "
            "A run that was killed is there up to its last quarter of a second; what is damaged is left out, and said. "
            "With --format, the same for programs and language models in at most 64 KB.",
            examples={
                "gradwatch report lightning_logs/version_3": "writes gradwatch_report.html into that folder",
                "gradwatch report runs/today -o today.html": "writes it elsewhere",
                "gradwatch report runs/today --format md": "prints a summary, to paste or to pipe",
            },
            exits={"0": "it is written", "2": "there is no such run, or it cannot be read, or the page not written"},
            more="`gradwatch ls` lists the runs.",
        ),
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="the run's log directory, or its event file")
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from gradwatch.runs.files import Unreadable

    try:
        return _summary(options) if options.format != "html" else _page(options)
    except Unreadable as error:
        return complain("report", error)
    except BrokenPipeError:  # what prints, not what reads
        raise
    except OSError as error:
        return complain("report", f"cannot read {error.filename or options.path}: {error.strerror}")


def _page(options: argparse.Namespace) -> int:
    from gradwatch.runs.reader import read_run
    from gradwatch.runs.report.page import page
    from gradwatch.runs.report.run_data import RunDataReader
    from gradwatch.runs.report.sink import NAME

    path: Path = options.path
    out: Path = options.out or (path if path.is_dir() else path.parent)
    if out.is_dir():
        out = out / NAME
    replayed = RunDataReader()
    with reading(path) as progress:
        notes = read_run(path, replayed, progress=progress)
    data = replayed.data(notes)
    if code := write_page("report", out, page(data, source=str(path))):
        return code
    for note in notes:
        print(f"Note: {printable(note)}")
    print(str(data.verdict).splitlines()[0])
    print(printable(out))
    return OK


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
