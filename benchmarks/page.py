"""Where tables go: the terminal, a JSON file, the page docs/performance_figures.md."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.rows import COLUMNS, Table

DOCS = Path(__file__).parent.parent / "docs" / "performance_figures.md"

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

COLOURS = {"PASS": "green", "miss": "red", "": ""}


def show(table: Table, console: Console) -> None:
    drawn = RichTable(title=Text(table.title, style="bold"), title_justify="left")
    for column in COLUMNS:
        drawn.add_column(column, justify="right" if column in ("measured", "95 % interval", "target") else "left")
    for row in table.rows:
        *cells, verdict = row.cells
        drawn.add_row(*map(Text, cells), Text(verdict, style=COLOURS[verdict]))
    console.print(drawn)


def machine() -> str:
    return f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"


def write_json(tables: Iterable[Table], path: Path) -> None:
    content = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "tables": {table.name: [{**asdict(row), "passed": row.passed} for row in table.rows] for table in tables},
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def markdown(table: Table) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells for row in table.rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_figures(page: str, tables: Iterable[Table]) -> str:
    """`page` with `tables` in the place that is marked for them, each in that of the same title; others stay as they
    are. Raises ValueError where there is no place.
    """
    before, begin, rest = page.partition(BEGIN)
    kept, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for figures: {BEGIN} ... {END}")
    sections = {text.partition("\n")[0]: text.strip() for text in kept.split("### ")[1:]}
    measured = f"Measured on {date.today().isoformat()}: {machine()}; one thread."
    sections |= {table.title: f"{table.title}\n\n{measured}\n\n{markdown(table)}" for table in tables}
    return f"{before}{begin}\n\n" + "\n\n".join(f"### {text}" for text in sections.values()) + f"\n\n{end}{after}"


def write_docs(tables: Iterable[Table], path: Path = DOCS) -> None:
    path.write_text(with_figures(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
