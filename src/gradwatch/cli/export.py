"""`gradwatch export`: a statistic of a run as a table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gradwatch.cli.command import OK, complain, help_text, reading
from gradwatch.core.printable import printable


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write a statistic of a run as a table: CSV or Parquet",
        **help_text(
            "Read the record of a run and write one statistic as a table: a row for each recorded step, with its "
            "place on the x-axis of the Trainer's logs, the loss, the learning rate and other numbers of the whole "
            "step (those with grad_norm), the total, and a column for each layer. Steps without a number are empty.",
            examples={
                "gradwatch export lightning_logs/version_3 --to norms.csv": "the gradient norms",
                "gradwatch export runs/today --to updates.parquet --statistic update_ratio": "another statistic",
            },
            exits={
                "0": "it is written",
                "2": "there is no such run or statistic, or it cannot be written; Parquet needs pyarrow or pandas",
            },
            more="`gradwatch ls` lists the runs.",
        ),
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="the run's log directory, or its event file")
    parser.add_argument("--to", metavar="FILE", type=Path, required=True, help="a file that ends with .csv or .parquet")
    parser.add_argument("--statistic", metavar="NAME", default="grad_norm", help="which one (default: grad_norm)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from gradwatch.runs.arrays import read
    from gradwatch.runs.names import counted
    from gradwatch.runs.table import FORMATS, write_csv, write_parquet

    out: Path = options.to
    if out.suffix.lower() not in FORMATS:
        return complain("export", f"{out} ends with neither of {', '.join(FORMATS)}")
    with reading(options.path) as progress:
        found = read(options.path, progress=progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        (write_csv if out.suffix.lower() == ".csv" else write_parquet)(found, options.statistic, out)
    except ImportError as error:
        needs = "Parquet needs pyarrow or pandas with an engine for it; --to FILE.csv needs neither"
        return complain("export", f"{needs} ({error})")
    series = found.values[options.statistic]
    thinned = f", one of every {series.every} of a long run" if series.every > 1 else ""
    print(f"{counted(len(series.steps), 'step')} x {len(found.table(options.statistic)):,} columns{thinned}")
    print(printable(out))
    return OK
