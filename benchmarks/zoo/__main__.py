"""Train the zoo, or what is left of it to train, and print who noticed what: `python -m benchmarks.zoo [--help]`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.zoo.book import DEFAULT, Book, tasks
from benchmarks.zoo.catalogue import CASES, halves
from benchmarks.zoo.page import show, write_docs
from benchmarks.zoo.trial import WATCHES, Task, end_with_parent, work


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="shell patterns on names or faults")
    parser.add_argument("--half", choices=("tuned", "held_out"), help="one half of the cases")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    eyes = (*WATCHES, "remedy", "peers")
    parser.add_argument("--eye", choices=eyes, nargs="+", default=eyes, help="who watches, if not all of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--folder", type=Path, default=DEFAULT, help="where outcomes are kept, to go on from")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/detection.md")
    parser.add_argument("--list", action="store_true", help="what is in the zoo; nothing is trained")
    return parser.parse_args(given)


def chosen(patterns: Sequence[str], half: str | None = None) -> list[str]:
    """Names of the cases that any of `patterns` fits, by name or by fault."""
    split = halves()
    names = [
        name
        for name, case in CASES.items()
        if any(fnmatchcase(name, p) or fnmatchcase(case.fault, p) for p in patterns) and half in (None, split[name])
    ]
    if not names:
        raise SystemExit(f"no case fits {' '.join(patterns)}; see --list")
    return names


def train(wanted: Sequence[Task], book: Book, console: Console, *, jobs: int) -> None:
    """Run what `book` lacks."""
    open_tasks = [task for task in wanted if task not in book]
    if not open_tasks:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=end_with_parent) as pool,
    ):
        bar = progress.add_task("trials", total=len(wanted), completed=len(wanted) - len(open_tasks))
        futures = {pool.submit(work, task): task for task in open_tasks}
        for future in as_completed(futures):
            book.add(future.result())
            progress.update(bar, advance=1, description=futures[future].case)


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 200)
    names = chosen(options.only, options.half)
    if options.list:
        split = halves()
        for name in names:
            case = CASES[name]
            console.print(f"{case.fault:12} {split[name]:8} {name}: {case.what}", highlight=False, soft_wrap=True)
        return 0
    wanted = [task for task in tasks(names, options.seeds) if task.eye in options.eye]
    book = Book(options.folder)
    train(wanted, book, console, jobs=options.jobs)
    outcomes = book.outcomes(wanted)
    show(outcomes, console)
    if options.write_docs:
        write_docs(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
