"""At the end of a fit, for people: the verdict, and one table with a line per layer and tapped tensor."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert, Severity, Verdict
from gradwatch.core.record import Floats, Layout, Missing, Record, Run
from gradwatch.sinks.downsampling import Downsampling
from gradwatch.sinks.terminal.layer_table import LEGEND, NARROWEST, TableRow, select_rows, table
from gradwatch.sinks.terminal.progress_bars import print_whole

if TYPE_CHECKING:
    from rich.console import Console as Terminal

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTICE: "dim"}


class Console:
    """Prints to `sys.stdout`; in colour only on a terminal, and not where NO_COLOR is set."""

    def __init__(self, *, width: int | None = None, rows: int = 40) -> None:
        """`width`: columns, None for the terminal's own. `rows`: layers shown at most."""
        for name, value, least in (("width", width, NARROWEST), ("rows", rows, 4)):
            if value is None and name == "width":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: give a whole number, {least} or more")
            if value < least:
                raise ValueError(f"{name}={value}: give {least} or more")
        self.width = width
        self.rows = rows
        self._layout: Layout | None = None
        self._digest = Downsampling(0)
        self._places: NDArray[np.intp]
        self._zeros: Floats
        self._codes: NDArray[np.int8]

    def open(self, run: Run) -> None:
        self._adopt(run.layout)

    def record(self, record: Record) -> None:
        if record.layout is not self._layout:
            self._adopt(record.layout)
        codes = record.codes[self._places]
        if "grad_norm" in record.values:
            self._digest.add(record.values["grad_norm"][self._places], codes == int(Missing.MEASURED))
            self._codes = codes
        if record.has("zero_fraction"):
            zeros = record.values["zero_fraction"][self._places]
            np.copyto(self._zeros, zeros, where=~np.isnan(zeros))

    def alert(self, alert: Alert) -> None:
        pass

    def close(self, verdict: Verdict) -> None:
        from rich.console import Console as Terminal

        terminal = Terminal(width=self.width, highlight=False, force_jupyter=False)
        terminal.width = max(NARROWEST, terminal.width)
        # captured, so that it goes through the stand-in of a live display rather than past it
        with terminal.capture() as captured:
            _print_verdict(terminal, verdict)
            if self._layout is not None and self._digest.seen.any():
                self._print_table(terminal, self._layout, verdict)
        self._layout = None
        text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
        if terminal.options.ascii_only:
            text = text.encode("ascii", "replace").decode("ascii")
        print_whole(text)

    def _adopt(self, layout: Layout) -> None:
        """A line for the total, each layer and each tapped tensor of `layout`, which begins with the sites of the one
        before.
        """
        # sorted: what is adopted later comes last, and the lines of before keep their places
        self._places = np.sort(np.concatenate([[0], layout.layers, layout.taps]).astype(np.intp))
        rows = len(self._places)
        if self._layout is None:
            self._digest, self._zeros = Downsampling(0), np.empty(0)
            self._codes = np.empty(0, dtype=np.int8)
        self._digest.grow(rows)
        self._zeros = np.pad(self._zeros, (0, rows - len(self._zeros)), constant_values=np.nan)
        self._codes = np.pad(self._codes, (0, rows - len(self._codes)), constant_values=Missing.NOT_SAMPLED)
        self._layout = layout

    def _print_table(self, terminal: Terminal, layout: Layout, verdict: Verdict) -> None:
        alerts = self._alerts_by_row(layout, verdict)
        total, *layers = self._rows(layout, alerts)
        ill = [place for place in range(len(layers)) if any(_loud(alert) for alert in alerts.get(place + 1, ()))]
        shown = select_rows(len(layers), ill, self.rows)
        lines: list[TableRow | None] = [total]
        for before, place in zip([-1, *shown], shown, strict=False):
            lines += [None, layers[place]] if place > before + 1 else [layers[place]]
        ascii_only = terminal.options.ascii_only
        terminal.print()
        terminal.print(table(lines, width=terminal.width, ascii_only=ascii_only))
        notes = [
            f"{column}: {text}"
            for column, text in LEGEND.items()
            if column != "zero" or not np.isnan(self._zeros).all()
        ]
        if len(shown) < len(layers):
            hidden = len(set(ill) - set(shown))
            with_alerts = f", {hidden} of them with alerts" * bool(hidden)
            what = "layers and tapped tensors" if len(layout.taps) else "layers"
            notes.append(f"{len(layers) - len(shown)} of {len(layers)} {what} left out{with_alerts}")
        for note in notes:
            terminal.print("\n".join(wrap(note, terminal.width)), style="dim", markup=False, emoji=False)

    def _rows(self, layout: Layout, alerts: dict[int, list[Alert]]) -> list[TableRow]:
        digest = self._digest
        columns = {
            "median": digest.median,
            "min": digest.minimum,
            "max": digest.maximum,
            "last": digest.last,
            "zero": self._zeros,
        }
        rows = []
        for row, name in enumerate(layout.names(self._places)):
            if row in alerts:
                status = tuple(dict.fromkeys(alert.rule for alert in alerts[row]))
                style = STYLES[alerts[row][0].severity]
            elif digest.seen[row]:
                status, style = ("ok",) if row else (), "green"
            else:
                status, style = (Missing(int(self._codes[row])).name.lower().replace("_", " "),), "dim"
            numbers = {field: float(column[row]) for field, column in columns.items()}
            seen = bool(digest.seen[row])
            name += " (tap)" * (layout.sites[self._places[row]].kind == "tap")
            rows.append(
                TableRow(name, seen, digest.low[:, row], digest.high[:, row], **numbers, status=status, style=style)
            )
        return rows

    def _alerts_by_row(self, layout: Layout, verdict: Verdict) -> dict[int, list[Alert]]:
        """Row -> the incidents that concern it, worst first; those of a parameter are its layer's."""
        rows = {int(place): row for row, place in enumerate(self._places)}
        found: dict[int, list[Alert]] = {}
        for alert in verdict.incidents:
            sites = {layout.sites[layout.index[site]].layer for site in alert.sites if site in layout.index}
            for place in sites:
                found.setdefault(rows[place], []).append(alert)
        return found


def _loud(alert: Alert) -> bool:
    return alert.severity is not Severity.NOTICE


def _print_verdict(terminal: Terminal, verdict: Verdict) -> None:
    """`str(verdict)` with hanging indents, and each incident's headline in the colour of its severity."""
    from rich.text import Text

    for number, line in enumerate(str(verdict).splitlines()):
        severity = re.match(r"\d+\. (\w+): ", line)
        style = STYLES[Severity(severity[1])] if severity else "bold" if number == 0 else ""
        indent = " " * (len(line) - len(line.lstrip()))
        hanging = "   " if severity else indent
        # a path stays in one piece, to be copied: the terminal folds it
        pieces = wrap(line, terminal.width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
        for piece in pieces:
            terminal.print(Text(piece, style=style), soft_wrap=True)
