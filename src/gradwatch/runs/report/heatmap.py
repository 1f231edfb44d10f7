"""The heatmap: layers from top to bottom, steps from left to right, and where the alerts began."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import floor, log10

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Severity
from gradwatch.core.record import Floats
from gradwatch.runs.pages import figure
from gradwatch.runs.report.run_data import RunData
from gradwatch.sinks.colormap import (
    DIVERGING,
    NONFINITE_COLOUR,
    VIRIDIS,
    ZERO_COLOUR,
    ColourScale,
    diverging_scale_of,
    format_power_of_ten,
    palette,
    scale_of,
)
from gradwatch.sinks.downsampling import Downsampling, Logs
from gradwatch.sinks.map_rows import apart, rows_of
from gradwatch.sinks.terminal.layer_table import shorten_name

MAX_ROW_HEIGHT, LABEL_HEIGHT = 22.0, 13.0
"""Pixels of a row, at most, and of a label. Judgement."""

MAX_HEIGHT = 960.0
"""Pixels of the whole picture, at most. Judgement: a screen."""

PRINTED_HEIGHT = 340.0
"""The same on paper, as in style.css: two pictures share a page."""

MIN_UNHEALTHY_HEIGHT, MAX_HIGHER = 10, 12
"""Pixels of a row that an alert names, at least, and such rows, at most: of more, none is higher. Judgement."""

CHARACTER_WIDTH, NAMES_MARGIN = 8.0, 10.0
"""Pixels of a bold character of a name, and of the margin beside the names. Judgement."""

MIN_MARK_DISTANCE, MAX_MARK_LEVELS = 0.05, 4
"""Share of the width between two numbers on one level, at least, and levels, at most. Judgement, for a width of 400
pixels."""

TICK_COUNT = 6
"""Approximate number of labelled steps. Judgement."""

LAST_TICKS = 0.96
"""Share of the width from which on a tick's number stands left of it."""

MAX_NAME_LENGTH = 28
"""Characters of a name, at most. Judgement."""


@dataclass(frozen=True, slots=True)
class IncidentMark:
    """Where an alert began."""

    number: int
    """Its place in the list of alerts, from 1."""
    severity: Severity
    axis: int
    text: str
    """Said where the mouse rests on it."""


def heatmap(
    course: Downsampling,
    names: Sequence[str],
    *,
    severities: Mapping[int, Severity],
    marks: Sequence[IncidentMark],
    title: str,
    note: str,
    diverging: bool = False,
) -> str:
    """HTML of one statistic; `names` are those of the rows without the total, `severities` the worst severity of each
    row's alerts. `diverging`: the numbers are ratios, 1 is neutral, and a column shows what is furthest from it.
    """
    low, high = course.extremes()
    first, _ = course.axis
    if diverging:
        high = np.where(-low > high, low, high)
    unhealthy = sorted(severities, key=lambda place: -severities[place].order)
    layers = high[:, 1:].T
    logs, begins = rows_of(layers, layers, int(MAX_HEIGHT), first=unhealthy)  # a browser draws no row below a pixel
    scale, colours = (diverging_scale_of(logs), DIVERGING) if diverging else (scale_of(logs), VIRIDIS)
    worst: dict[int, int] = {}  # row -> the layer that it is named after
    for place in unhealthy:
        worst.setdefault(int(np.searchsorted(begins, place, side="right")) - 1, place)
    times = _times(len(begins), [*worst])
    edges = np.append(0, np.cumsum(times))
    picture = png(np.repeat(scale.shade(logs), times, axis=0), colours)
    row = min(MAX_ROW_HEIGHT, MAX_HEIGHT / edges[-1])
    middles = (edges[:-1] + edges[1:]) / 2
    if len(begins) < len(names):
        most = -(-len(names) // len(begins))
        note += f" A row is up to {most:,} layers, and shows what is zero, not finite or far from the rest."
    if times.max() > 1:
        note += " Layers with a coloured name are drawn higher."
    span = course.stride * len(course)

    def left(axis: float) -> str:
        return f"{100 * course.share(axis):.2f}%"

    named = [(line, worst.get(line, int(begins[line]))) for line in labelled(middles * row, row, [*worst])]
    lines = [line for line, _ in named]
    on_paper = middles * min(row, PRINTED_HEIGHT / edges[-1])
    printed = apart([*(line for line in worst if line in lines), *lines], on_paper, LABEL_HEIGHT)
    shown = [
        {
            "severity": str(severities.get(place, "")),
            "print": line in printed,
            "top": f"{100 * middles[line] / edges[-1]:.2f}",
            "whole": names[place],
            "short": shorten_name(names[place], MAX_NAME_LENGTH),
        }
        for line, place in named
    ]
    levels = _levels([(mark.axis - first) / span for mark in marks])
    return figure(
        "heatmap",
        title=title,
        note=note,
        level=max(levels, default=0),
        legend=_legend(logs, scale, colours),
        width=names_width(names),
        height=f"--high:{row * edges[-1]:.0f}px",
        names=shown,
        marks=[(mark, left(mark.axis), level) for mark, level in zip(marks, levels, strict=True)],
        picture=picture,
        layers=len(names),
        ticks=[
            {"left": left(step), "text": f"{step:,}", "end": step - first > LAST_TICKS * span}
            for step in ticks_of(first, first + span - 1)
        ],
    )


def small_map(data: RunData, rows: int) -> str:
    """The gradient norms of all layers in at most `rows` rows, as `png` gives it."""
    _, high = data.summary.grad_norm.extremes()
    layers = high[:, 1:].T
    logs, _ = rows_of(layers, layers, rows, first=[*data.unhealthy])
    return png(scale_of(logs).shade(logs))


def png(places: NDArray[np.uint8], colours: tuple[str, ...] = VIRIDIS) -> str:
    """`places` in the palette, shape [height, width], the top row first, in base64: browsers enlarge it."""
    from PIL import Image

    shades = palette(colours)
    image = Image.fromarray(places)
    image.putpalette(shades[:, :3].tobytes())
    file = BytesIO()
    image.save(file, "png", transparency=shades[:, 3].tobytes(), compress_level=9)
    return base64.b64encode(file.getvalue()).decode()


def _times(rows: int, unhealthy: Sequence[int]) -> NDArray[np.intp]:
    """How many times as high as the others each row is: one that an alert names among many is seen."""
    times = np.ones(rows, dtype=np.intp)
    if 0 < len(unhealthy) <= MAX_HIGHER:
        times[[*unhealthy]] = max(1, round(MIN_UNHEALTHY_HEIGHT * rows / MAX_HEIGHT))
    return times


def names_width(names: Sequence[str]) -> str:
    """CSS: the width of the names beside a picture."""
    longest = max(len(shorten_name(name, MAX_NAME_LENGTH)) for name in names)
    return f"--names:{NAMES_MARGIN + CHARACTER_WIDTH * longest:.0f}px"


def labelled(middles: Floats, row: float, first: Sequence[int]) -> list[int]:
    """The rows that are named: all if there is room, otherwise those that come `first`, then evenly spread ones.
    `middles`: of the rows, in pixels; `row`: the height of one.
    """
    rows, count = LABEL_HEIGHT / row, len(middles)
    if rows <= 1:
        return list(range(count))
    spread = np.unique(np.linspace(0, count - 1, max(2, int(count / rows / 1.5))).round().astype(int)).tolist()
    return sorted(apart([*first, *spread], middles, LABEL_HEIGHT))


def ticks_of(first: int, last: int) -> list[int]:
    """About `TICK_COUNT` round steps from `first` to `last`."""
    span = max(1, last - first)
    rough = span / TICK_COUNT
    power = 10 ** floor(log10(rough)) if rough >= 1 else 1
    step = next((int(power * factor) for factor in (1, 2, 5, 10) if power * factor >= rough), 1)
    return list(range(-(-first // step) * step, last + 1, max(1, step)))


def _levels(places: Sequence[float]) -> list[int]:
    """The level of each mark's number, so that none hides another; `places`: shares of the picture's width."""
    last: list[float] = []
    levels = [0] * len(places)
    for mark in sorted(range(len(places)), key=lambda mark: places[mark]):
        free = (level for level, place in enumerate(last) if places[mark] - place >= MIN_MARK_DISTANCE)
        levels[mark] = level = next(free, len(last) if len(last) < MAX_MARK_LEVELS else MAX_MARK_LEVELS - 1)
        last[level : level + 1] = [places[mark]]
    return levels


def _legend(logs: Logs, scale: ColourScale, colours: tuple[str, ...]) -> dict[str, object]:
    """What the colours mean; `special`: text and colour, empty for what has none."""
    times = "x" if colours is DIVERGING else ""
    special = (
        ("zero", ZERO_COLOUR, np.isneginf(logs)),
        ("not finite", NONFINITE_COLOUR, np.isposinf(logs)),
        ("not measured", "", np.isnan(logs)),
    )
    return {
        "low": "≤ " * scale.clipped_low + times + format_power_of_ten(scale.low),
        "high": "≥ " * scale.clipped_high + times + format_power_of_ten(scale.high),
        "gradient": f"linear-gradient(to right, {', '.join('#' + colour for colour in colours)})",
        "special": [(text, colour) for text, colour, where in special if where.any()],
    }
