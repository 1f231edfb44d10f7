"""The table of a run: one line per layer, fitted to the width of the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradwatch.core.number_text import short_exponent
from gradwatch.sinks.colormap import ColourScale, palette, scale_of
from gradwatch.sinks.downsampling import Logs
from gradwatch.sinks.terminal.sparkline import sparkline

if TYPE_CHECKING:
    from rich.text import Text

NARROWEST = 60
"""Terminal columns that the table needs."""

BAR_FROM = 96
"""Terminal columns from which the bars are shown, `BAR_WIDTH` columns wide."""
BAR_WIDTH = 8

EIGHTHS = "▏▎▍▌▋▊▉█"

LEGEND = {
    "size": "log10 of the median gradient, one scale and one colour map for all layers",
    "trend": "log10 grad_norm, each line on its own scale; 0 is zero, x is not finite",
    "zero": "share of the gradient that is exactly zero",
}
"""Explanations of the columns, printed below the table."""

LEFT = frozenset({"layer", "size", "trend", "status"})
"""Columns that are aligned to the left; those of numbers are aligned to the right."""


@dataclass(frozen=True, slots=True, eq=False)
class TableRow:
    """A layer's gradient norm over a run."""

    name: str
    measured: bool
    low: Logs
    """Lowest log10 norm over time, oldest first."""
    high: Logs
    median: float
    """This and the extremes are of the finite norms; NaN without any."""
    min: float
    max: float
    last: float
    zero: float
    """Share of the gradient that is exactly zero, NaN where it was not measured."""
    status: tuple[str, ...]
    style: str = ""

    def numbers(self, width: int) -> dict[str, str]:
        """Median, extremes and last norm in `width` characters each."""
        known = {"median": self.median, "min": self.min, "max": self.max}
        found = {name: format_number(number, width) if number == number else "-" for name, number in known.items()}
        return {**found, "last": format_number(self.last, width) if self.measured else "-"}


def table(rows: Sequence[TableRow | None], *, width: int, ascii_only: bool = False) -> Text:
    """The table of `rows` in `width` columns; None marks a gap. Names are not interpreted as markup.

    `rich.table.Table` is not used, as it takes a millisecond a row (measured).
    """
    from rich.text import Text

    columns = column_widths([row for row in rows if row is not None], width)
    headers = {name: name if len(name) <= cells else f"{name[: cells - 2]}." for name, cells in columns.items()}
    pieces = [*_line(headers, columns, dict.fromkeys(columns, "bold"))]
    with np.errstate(divide="ignore"):
        logs = np.log10([np.nan if row is None else row.median for row in rows])
    logs[0] = np.nan  # the total is no layer
    scale = scale_of(logs)
    colours = palette()[scale.shade(logs)].tolist()
    for place, row in enumerate(rows):
        pieces.append(("\n", None))
        if row is None:
            pieces.append(("..." if ascii_only else "⋮", "dim"))
            continue
        cells = {
            "layer": shorten_name(row.name, columns["layer"], ascii_only=ascii_only),
            "size": bar(logs[place], scale, ascii_only=ascii_only),
            "trend": sparkline(row.low, row.high, width=columns["trend"], ascii_only=ascii_only),
            "zero": format_percent(row.zero),
            "status": join_words(row.status, columns["status"]),
        }
        cells |= row.numbers(columns["last"])
        red, green, blue, _ = colours[place]
        styles = {"size": f"rgb({red},{green},{blue})", "trend": "cyan", "status": row.style}
        pieces += _line(cells, columns, styles)
    return Text().append_tokens(pieces)


def _line(
    cells: Mapping[str, str], columns: Mapping[str, int], styles: Mapping[str, str]
) -> Iterator[tuple[str, str | None]]:
    """The pieces of a line and their styles: words are aligned to the left of their columns, numbers to the right."""
    from rich.cells import cell_len, set_cell_size

    for name, width in columns.items():
        cell = cells[name] if name in LEFT else " " * (width - cell_len(cells[name])) + cells[name]
        yield set_cell_size(cell, width), styles.get(name)
        yield " ", None


def column_widths(rows: Sequence[TableRow], width: int) -> dict[str, int]:
    """Column -> its width, so that all columns and the blanks between them fit in `width`. Judgement, by looking."""
    from rich.cells import cell_len

    name = max(cell_len(row.name) for row in rows)
    status = max(len(", ".join(row.status)) for row in rows)
    number = 5 if width < 80 else 7
    zero = {"zero": 4} if any(row.zero == row.zero for row in rows) else {}
    bars = {"size": BAR_WIDTH} if width >= BAR_FROM else {}
    blanks = 6 + len(zero) + len(bars)
    room = width - 4 * number - sum(zero.values()) - sum(bars.values()) - blanks
    word = max(len(row.status[0].split()[0]) if row.status else 0 for row in rows)
    status = max(len("status"), min(status, max(room // 3, min(word, room // 2))))
    name = max(len("layer"), min(name, room - status - max(6, room // 5)))
    name = max(len("layer"), *(cell_len(shorten_name(row.name, name)) for row in rows))
    trend = min(room - status - name, max(len("trend"), min(48, max(len(row.low) for row in rows))))
    numbers = dict.fromkeys(("median", "min", "max", "last"), number)
    return {"layer": name, **bars, "trend": trend, **numbers, **zero, "status": status}


def bar(log: float, scale: ColourScale, *, ascii_only: bool = False) -> str:
    """A bar of at most `BAR_WIDTH` characters: as long as `log`, the log10 of a number, lies high on the scale.

    '0' is -inf, nothing is NaN; what is lowest has an eighth of a character.
    """
    if not math.isfinite(log):
        return "" if log != log else "0"
    share = min(1.0, max(0.0, (log - scale.low) / (scale.high - scale.low)))
    eighths = max(1, round(share * 8 * BAR_WIDTH))
    if ascii_only:
        return "=" * max(1, round(eighths / 8))
    whole, rest = divmod(eighths, 8)
    return EIGHTHS[-1] * whole + (EIGHTHS[rest - 1] if rest else "")


def select_rows(count: int, marked: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of `count` indices, in order: first the `marked` ones, then both ends of the rest."""
    if count <= limit:
        return list(range(count))
    first = _ends(marked, limit - max(2, limit // 4))
    rest = _ends([place for place in range(count) if place not in set(first)], limit - len(first))
    return sorted([*first, *rest])


def shorten_name(name: str, width: int, *, ascii_only: bool = False) -> str:
    """A dotted name in `width` columns of a terminal, of which East Asian characters take two: outer parts become
    initials with their numbers; then its middle is cut.
    """
    from rich.cells import cell_len

    parts = name.split(".")
    for i in range(len(parts) - 1):
        if cell_len(".".join(parts)) > width and not parts[i].isdigit():
            parts[i] = re.sub(r"(?s)(?<=^.).*?(?=\d*$)", "", parts[i], count=1)
    name = ".".join(parts)
    if cell_len(name) <= width:
        return name
    begin, end = name[: (width - 1) // 2], name
    while cell_len(begin) > (width - 1) // 2:
        begin = begin[:-1]
    while cell_len(begin) + 1 + cell_len(end) > width:
        end = end[1:]
    return begin + ("~" if ascii_only else "…") + end


def format_number(number: float, width: int) -> str:
    """Up to three significant digits in `width` characters, five or more: '0.034', '3.4e-5'."""
    size = abs(float(f"{number:.3g}"))  # 0.01 as float32 is less
    plain = size == 0 or not math.isfinite(size) or 0.01 <= size < 1000
    for digits in (3, 2) if plain else (2, 1):
        text = f"{number:.{digits}g}" if plain else short_exponent(f"{number:.{digits - 1}e}")
        if len(text) <= width:
            break
    return text


def join_words(words: Sequence[str], width: int) -> str:
    """`words` in `width` characters: all, or the first and the number of others, or the first alone; of that its first
    word where nothing else fits.
    """
    if not words:
        return ""
    first, more = words[0], f" +{len(words) - 1}" if len(words) > 1 else ""
    forms = (", ".join(words), f"{first}{more}", f"{first.split()[0]}{more}", first.split()[0])
    return next((form for form in forms if len(form) <= width), forms[-1])


def format_percent(share: float) -> str:
    if share != share:
        return "-"
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def _ends(places: Sequence[int], n: int) -> list[int]:
    """`n` of `places`, from both ends."""
    if len(places) <= n:
        return list(places)
    return [*places[: n - n // 2], *places[len(places) - n // 2 :]]
