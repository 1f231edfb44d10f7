"""Train every report, broken and fixed, and print what GradWatch says: `python -m benchmarks.reports [--help]`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from itertools import product

from rich.console import Console

from benchmarks.reports.catalogue import REPORTS
from benchmarks.reports.page import show, write_docs
from benchmarks.reports.trial import Outcome, work
from benchmarks.zoo.trial import end_with_parent


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reports", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="shell patterns on names")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/detection.md")
    parser.add_argument("--list", action="store_true", help="the reports and their addresses; nothing is trained")
    return parser.parse_args(given)


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 200)
    names = [name for name in REPORTS if any(fnmatchcase(name, pattern) for pattern in options.only)]
    if options.list:
        for name in names:
            report = REPORTS[name]
            console.print(f"{name}  {report.address}\n    {report.cause}", highlight=False, soft_wrap=True)
        return 0
    outcomes: list[Outcome] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=end_with_parent) as pool:
        tasks = list(product(names, options.seeds))
        for outcome in pool.map(work, *zip(*tasks, strict=True)):
            outcomes.append(outcome)
    show(outcomes, console)
    if options.write_docs:
        write_docs(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
