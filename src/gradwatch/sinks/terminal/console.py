"""Prints the verdict and a table with one line per layer and tapped tensor at the end of a fit."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from gradwatch.core.alert import Alert, Severity, Verdict, step_word, wrapped
from gradwatch.core.arguments import check_whole
from gradwatch.core.block import Block
from gradwatch.core.printable import printable
from gradwatch.core.record import Missing, Run
from gradwatch.sinks.run_summary import RowFault, RunSummary
from gradwatch.sinks.terminal.layer_table import BAR_FROM, LEGEND, NARROWEST, TableRow, select_rows, table
from gradwatch.sinks.terminal.progress_bars import print_whole

if TYPE_CHECKING:
    from rich.text import Text

WIDEST = 10_000
"""Columns: a table fills all that it is given. Judgement."""

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTICE: "dim"}


class Console:
    """Prints to `sys.stdout`, with colours on a terminal unless NO_COLOR is set."""

    def __init__(self, *, width: int | None = None, rows: int = 40) -> None:
        """`width`: columns, None for the terminal's width. `rows`: layers in the table, at most."""
        expected = f"from {NARROWEST} to {WIDEST} columns, or None for the terminal's own"
        self.width = None if width is None else check_whole("width", width, expected, least=NARROWEST, most=WIDEST)
        self.rows = check_whole("rows", rows, "a number of layers of at least 4", least=4)
        self._summary: RunSummary | None = None

    def open(self, run: Run) -> None:
        self._summary = self._summary or run.summary or RunSummary()
        self._summary.adopt(run.layout)

    def block(self, block: Block) -> None:
        if self._summary is not None:
            self._summary.block(block)

    def alert(self, alert: Alert) -> None:
        pass

    def close(self, verdict: Verdict) -> None:
        from rich.console import Console as Terminal

        terminal = Terminal(width=self.width, highlight=False, force_jupyter=False)
        width, ascii_only = max(NARROWEST, terminal.width), terminal.options.ascii_only
        shown = _verdict_text(verdict, width)
        if self._summary is not None and self._summary.grad_norm.seen.any():
            self._add_table(shown, self._summary, verdict, width=width, ascii_only=ascii_only)
        self._summary = None
        # captured and printed at the end, so that it passes through the stream of a live display
        with terminal.capture() as captured:
            terminal.print(shown, soft_wrap=True)  # once: each call asks the environment about the terminal
        text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
        if ascii_only:
            text = text.encode("ascii", "replace").decode("ascii")
        print_whole(text)

    def _add_table(self, text: Text, summary: RunSummary, verdict: Verdict, *, width: int, ascii_only: bool) -> None:
        faults = summary.faults_by_row(verdict)
        total, *layers = table_rows(summary, faults)
        # worst first: of one without a warning or an error all faults are notices
        unhealthy = [row - 1 for row in sorted(faults) if row and faults[row][0].severity is not Severity.NOTICE]
        shown = select_rows(len(layers), unhealthy, self.rows)
        lines: list[TableRow | None] = [total]
        for before, place in zip([-1, *shown], shown, strict=False):
            lines += [None, layers[place]] if place > before + 1 else [layers[place]]
        text.append("\n\n").append_text(table(lines, width=width, ascii_only=ascii_only))
        notes = [
            f"{column}: {text}"
            for column, text in LEGEND.items()
            if (column != "zero" or not np.isnan(summary.zeros).all()) and (column != "size" or width >= BAR_FROM)
        ]
        if summary.steps < verdict.steps:
            notes.append(f"numbers: of the {summary.steps:,} {step_word(verdict)}s since the run was resumed")
        if of := summary.grad_norm.median_of:
            notes.insert(1, f"median: {of}")
        if np.isposinf(summary.grad_norm.extremes()[1]).any():
            notes.append("median, min and max: of the finite numbers")
        if len(shown) < len(layers):
            hidden = len(set(unhealthy) - set(shown))
            with_alerts = f", {hidden} of them with alerts" * bool(hidden)
            what = "layers and tapped tensors" if len(summary.layout.taps) else "layers"
            notes.append(f"{len(layers) - len(shown)} of {len(layers)} {what} left out{with_alerts}")
        for note in notes:
            text.append("\n" + "\n".join(wrap(note, width)), "dim")


def table_rows(summary: RunSummary, faults: dict[int, list[RowFault]]) -> list[TableRow]:
    """A row for the total and each layer and tapped tensor. `faults`: of `summary`."""
    course, layout = summary.grad_norm, summary.layout
    columns = {
        "median": course.median,
        "min": course.minimum,
        "max": course.maximum,
        "last": course.last,
        "zero": summary.zeros,
    }
    (low, high), seen = course.extremes(), course.seen
    rows = []
    for row, name in enumerate(summary.names):
        if row in faults:
            status = tuple(dict.fromkeys(printable(fault.text) for fault in faults[row]))
            style = STYLES[faults[row][0].severity]
        elif seen[row]:
            status, style = ("ok",) if row else (), "green"
        else:
            status, style = (Missing(int(summary.codes[row])).name.lower().replace("_", " "),), "dim"
        numbers = {field: float(column[row]) for field, column in columns.items()}
        name = printable(name) + " (tap)" * (layout.sites[summary.places[row]].kind == "tap")
        rows.append(TableRow(name, bool(seen[row]), low[:, row], high[:, row], **numbers, status=status, style=style))
    return rows


def _verdict_text(verdict: Verdict, width: int) -> Text:
    """`str(verdict)` with hanging indents, and each incident's first line in the colour of its severity."""
    from rich.text import Text

    text = Text()
    for number, line in enumerate(verdict.lines):
        severity = re.match(r"\d+\. (\w+): ", line)
        style = STYLES[Severity(severity[1])] if severity else "bold" if number == 0 else ""
        text.append("\n" * (number > 0) + "\n".join(wrapped(printable(line), width)), style)
    return text
