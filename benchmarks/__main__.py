"""Measure, print, compare with the targets: `python -m benchmarks [--quick] [--only NAME ...]`."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console

from benchmarks.page import machine, show, write_docs, write_json
from benchmarks.tables import TABLES


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer workloads and repetitions, under 90 s")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=[*TABLES], metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/performance_figures.md")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target is missed")
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # the naive peer, on the first layer
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"{machine()}; one thread, CPU time; targets are upper bounds", highlight=False)
    tables = []
    for name in chosen.only:
        begun = perf_counter()
        table = TABLES[name](chosen.quick)
        tables.append(table)
        show(table, console)
        console.print(f"{perf_counter() - begun:.0f} s\n", style="dim", highlight=False)
    if chosen.json:
        write_json(tables, chosen.json)
    if chosen.write_docs:
        write_docs(tables)
    missed = [row for table in tables for row in table.rows if not row.passed]
    return 1 if chosen.strict and missed else 0


if __name__ == "__main__":
    sys.exit(main())
