"""A recorded run on a terminal's screen: verdict, map in half blocks, loss, and the layers that are worst."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from gradwatch.core.alert import step_word
from gradwatch.core.number_text import number_text
from gradwatch.core.printable import printable
from gradwatch.runs.names import counted, extent_of
from gradwatch.runs.report.run_data import RunData
from gradwatch.sinks.colormap import palette, scale_of
from gradwatch.sinks.downsampling import Logs, extremes_of
from gradwatch.sinks.map_rows import most_distinct, rows_of
from gradwatch.sinks.terminal.console import STYLES, table_rows
from gradwatch.sinks.terminal.layer_table import NARROWEST, select_rows, shorten_name, table
from gradwatch.sinks.terminal.sparkline import sparkline

if TYPE_CHECKING:
    from rich.text import Text

LEAST_HEIGHT = 16
"""Lines that the view needs; on a lower screen its end is cut."""

MAX_LINES = 2
"""Lines of the verdict and of the remedy, at most."""

NAMES = 24
"""Columns of the names beside the map, at most."""

MAP_SHARE = 0.45
"""Share of the screen's height that the map takes, at most. Judgement."""

UPPER_HALF = "▀"


def view(data: RunData, *, name: str, width: int, height: int, colours: bool = True, ascii_only: bool = False) -> Text:
    """The screen, at most `height` lines of `width` columns. Without `colours` there is no map."""
    from rich.text import Text

    width = max(NARROWEST, width)
    lines = _head(data, name, width)
    summary = data.summary
    measured = len(summary.names) > 1 and bool(summary.grad_norm.seen.any())
    if measured:
        room = max(2, int(MAP_SHARE * max(LEAST_HEIGHT, height)))
        if colours and not ascii_only:
            lines += [Text(), *_map(data, width, room)]
        if loss := _loss(data, width, ascii_only=ascii_only):
            lines.append(loss)
        left = max(4, height - len(lines) - 2)
        lines += [Text(), *_worst(data, width, left, ascii_only=ascii_only)]
    else:
        lines += [Text(), Text("no step was measured so far", style="dim")]
    return Text("\n").join(lines[:height])


def _head(data: RunData, name: str, width: int) -> list[Text]:
    from rich.text import Text

    verdict = data.verdict
    serious = data.serious
    state = "ended" if data.verdict.ended else "under way, or cut off"
    steps = extent_of(verdict.steps, verdict.run_steps)
    if data.summary.steps < verdict.steps:
        steps = f"{data.summary.steps:,} of {counted(verdict.steps, step_word(verdict))} recorded here"
    extent = f"{counted(verdict.layers, 'layer')}, {steps}"
    facts = f"{extent}, {state}: {printable(name)}"
    style = STYLES[serious[0].severity] if serious else "bold" if verdict.failed else "bold green"
    found = [_cut(Text(facts, style="dim"), width), *_wrapped(data.status, width, style)]
    return found + (_wrapped(f"Try: {serious[0].remedy}", width) if serious else [])


def _wrapped(text: str, width: int, style: str = "") -> list[Text]:
    from rich.text import Text

    lines = wrap(printable(text), width, max_lines=MAX_LINES, placeholder=" …")
    return [_cut(Text(line, style=style), width) for line in lines]


def _map(data: RunData, width: int, room: int) -> list[Text]:
    """Two rows of layers a line: the upper one in the colour of the character, the lower one in that behind it."""
    from rich.cells import cell_len
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    summary = data.summary
    names = [printable(name) for name in summary.names[1:]]
    low, high = (logs[:, 1:].T for logs in summary.grad_norm.extremes())
    beside = min(NAMES, max(map(cell_len, names)))
    columns = min(width - beside - 1, max(high.shape[1], 1) * 2)
    worst = data.unhealthy
    shown, begins = rows_of(low, high, 2 * room, first=[*worst])
    rows = len(begins)
    logs = _stretched(shown, columns)
    shades = palette()[scale_of(logs).shade(logs)]
    found = []
    for row in range(0, rows, 2):
        own = range(int(begins[row]), int(begins[row + 2]) if row + 2 < rows else len(names))
        unhealthy = [place for place in worst if place in own]
        place = unhealthy[0] if unhealthy else own[0]
        style = STYLES[worst[place]] if unhealthy else "dim"
        name = shorten_name(names[place], beside)
        line = Text(" " * (beside - cell_len(name)) + f"{name} ", style=style)
        below = shades[row + 1] if row + 1 < rows else np.zeros_like(shades[row])
        for upper, lower in zip(shades[row].tolist(), below.tolist(), strict=True):
            front = Color.from_rgb(*upper[:3]) if upper[3] else None
            back = Color.from_rgb(*lower[:3]) if lower[3] else None
            line.append(UPPER_HALF if front or back else " ", Style(color=front or Color.default(), bgcolor=back))
        found.append(line)
    return found


def _stretched(logs: Logs, columns: int) -> Logs:
    """`logs` [rows, n] in `columns` columns: fewer are repeated, of more those that stand out are kept."""
    wide = logs.shape[1]
    if wide <= columns:
        return logs[:, np.arange(columns) * wide // columns]
    low, high, _ = extremes_of(logs.T, logs.T, columns)
    return most_distinct(low.T, high.T)


def _loss(data: RunData, width: int, *, ascii_only: bool) -> Text | None:
    from rich.text import Text

    if data.loss_levels is None or not len(data.loss):
        return None
    low, high = (numbers[:, 0] for numbers in data.loss.extremes())
    finite = high[np.isfinite(high)]
    if not len(finite):
        return Text("loss is not finite", style="bold red")
    span = float(finite.max() - finite.min()) or 1.0
    scaled = [(numbers - finite.min()) / span for numbers in (low, high)]  # a sparkline is a decade high at least
    first, last = (number_text(level, 4) if np.isfinite(level) else "not finite" for level in data.loss_levels)
    text = f" {first} to {last}"
    line = sparkline(*scaled, width=max(8, min(width - len(text) - 6, 120)), ascii_only=ascii_only)
    return Text.assemble(("loss ", "dim"), (line, "cyan"), text)


def _worst(data: RunData, width: int, room: int, *, ascii_only: bool) -> list[Text]:
    summary = data.summary
    faults = summary.faults_by_row(data.verdict)
    total, *layers = table_rows(summary, faults)
    unhealthy = [place for place in range(len(layers)) if place + 1 in faults]
    limit = room - 2
    few = len(unhealthy) >= limit - 2  # no room for both ends of the healthy ones
    shown = sorted(unhealthy[:limit]) if few and unhealthy else select_rows(len(layers), unhealthy, limit)
    text = table([total, *(layers[place] for place in shown)], width=width, ascii_only=ascii_only)
    lines = text.split("\n")
    for line in lines:
        line.rstrip()
    return [*lines]


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text
