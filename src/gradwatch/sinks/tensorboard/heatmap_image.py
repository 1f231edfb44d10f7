"""Draws the heatmap of a run: every layer's gradient norm by step, with the alerts marked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Verdict
from gradwatch.core.printable import printable
from gradwatch.sinks.colormap import MISSING, NONFINITE, ZERO, ColourScale, format_power_of_ten, palette, scale_of
from gradwatch.sinks.downsampling import Downsampling, Logs
from gradwatch.sinks.map_rows import apart, rows_of
from gradwatch.sinks.run_health import status
from gradwatch.sinks.run_summary import RunSummary
from gradwatch.sinks.tensorboard.captions import wrapped_to_pixels
from gradwatch.sinks.terminal.layer_table import shorten_name

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

MAP_WIDTH = 640
"""Width of the map in pixels: two and a half for each column of a `Downsampling`, or more. Judgement."""

MAP_HEIGHT = 660
"""Height of the map in pixels, at most, unless rows have one pixel. Judgement: it fits on a screen with the page."""

MAX_ROW_HEIGHT, LINE_HEIGHT = 22, 14
"""Pixels of a row, at most, and of a line of text. Judgement, by looking."""

MAX_ROWS = 1000
"""Rows of the map, at most; of more layers, neighbours share a row, which shows their extremes."""

HEADLINE_SIZE, HEADLINE_HEIGHT, HEADLINE_LINES = 32, 38, 2
"""Pixels of the headline's letters and of its lines, and lines, at most. Judgement: on a card of TensorBoard's the
picture has half its size or less."""

MEASURED_NAMES = 5
"""The longest names that are measured in pixels to find the widest: each takes 40 us."""

MAX_NAME_LENGTH = 32
"""Characters of a layer's name, at most. Judgement."""

INK, QUIET, PAPER, RED = (32, 33, 36), (120, 124, 130), (255, 255, 255), (200, 30, 40)

MISSING_COLOUR = (226, 226, 226)
"""The colour of cells without a number."""

PAPER_INDEX, STRENGTHS = MISSING + 1, 4
"""Index of the paper in the picture's palette, after those of the numbers; and shades of each ink, which follow."""
INK_INDEX = {ink: PAPER_INDEX + 1 + STRENGTHS * place for place, ink in enumerate((INK, QUIET, RED))}
"""Ink -> the index of its weakest shade."""

SPECIAL = {NONFINITE: "not finite", ZERO: "zero", MISSING: "no number"}
"""Shades that are not on the scale."""

FULL = 255
"""How strong an ink is drawn, but for the edges of letters."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An alert on the map."""

    text: str
    rows: tuple[int, ...]
    begin: float
    """Horizontal positions, 0 to 1, at which the alert opens and closes."""
    end: float


def heatmap_of(summary: RunSummary, verdict: Verdict) -> tuple[Image.Image, int]:
    """The heatmap of a run's layers, and its last position on the x-axis."""
    course, layout = summary.grad_norm, summary.layout
    rows = np.flatnonzero(np.isin(summary.places, layout.layers))
    row_of = {int(place): row for row, place in enumerate(layout.layers)}
    row_of_site = {site.name: row_of[site.layer] for site in layout.sites if site.layer in row_of}
    low, high = course.extremes()
    spans, marks = summary.positions.spans(verdict.incidents), []
    for alert in verdict.incidents:
        begin, end, _ = spans[alert.key]
        where = tuple(sorted({row_of_site[site] for site in alert.sites if site in row_of_site}))
        if begin is not None:
            until = 1.0 if end is None else course.share(end)
            marks.append(Mark(alert.rule, where, course.share(begin), max(until, course.share(begin))))
    names = layout.names(layout.layers)
    drawn = draw_heatmap(names, low[:, rows], high[:, rows], course, marks, headline=status(verdict))
    return drawn, course.axis[1]


def draw_heatmap(
    names: Sequence[str], low: Logs, high: Logs, course: Downsampling, marks: Iterable[Mark], *, headline: str = ""
) -> Image.Image:
    """An image of 256 colours. `names`: those of the rows. `low` and `high`: lowest and highest log10 norm, shape
    [columns, rows], over the x-axis of `course`. `headline`: text above the map, in letters that are read on
    TensorBoard's small cards too.
    """
    from PIL import Image, ImageDraw, ImageFont

    logs, groups = rows_of(low.T, high.T, MAX_ROWS)
    scale = scale_of(logs)
    row_height = max(1, min(MAX_ROW_HEIGHT, MAP_HEIGHT // len(groups)))
    texts = [shorten_name(printable(names[int(first)]), MAX_NAME_LENGTH) for first in groups]
    font: Any = ImageFont.load_default(size=11)
    longest = sorted(set(texts), key=len)[-MEASURED_NAMES:]  # one of them is the widest
    left = 14 + int(max(font.getlength(text) for text in longest))
    height, right = row_height * len(groups), 96
    large: Any = ImageFont.load_default(size=HEADLINE_SIZE)
    lines = wrapped_to_pixels(headline, large, left + MAP_WIDTH + right - 12, HEADLINE_LINES)
    above = len(lines) * HEADLINE_HEIGHT
    top = above + 46
    pixels = np.full((top + max(height, 104) + 34, left + MAP_WIDTH + right), PAPER_INDEX, dtype=np.uint8)
    columns = np.arange(MAP_WIDTH) * logs.shape[1] // MAP_WIDTH
    shades = scale.shade(logs)
    pixels[top : top + height, left : left + MAP_WIDTH] = np.repeat(shades[:, columns], row_height, axis=0)
    # text has soft edges: each ink is drawn as how strong it is, and then put into the palette's shades of it
    layers = {ink: Image.new("L", pixels.shape[::-1]) for ink in INK_INDEX}
    draw = {ink: ImageDraw.Draw(layer) for ink, layer in layers.items()}
    for number, line in enumerate(lines):
        draw[INK].text((6, 4 + number * HEADLINE_HEIGHT), line, fill=FULL, font=large)
    draw[INK].text((left, above + 6), "gradient norm of each layer", fill=FULL, font=font)
    marks = list(marks)
    row_of = np.repeat(np.arange(len(groups)), np.diff([*groups, len(names)]))
    marked = {int(row_of[row]) for mark in marks for row in mark.rows}
    every = range(0, len(groups), math.ceil(LINE_HEIGHT / row_height))
    wanted = [*sorted(marked), 0, len(groups) - 1, *every]
    for row in apart(wanted, row_height * np.arange(len(groups)), LINE_HEIGHT):
        ink = RED if row in marked else QUIET
        draw[ink].text((left - 8, top + (row + 0.5) * row_height), texts[row], fill=FULL, font=font, anchor="rm")
    _draw_marks(draw[RED], marks, row_of, (left, top), row_height, font)
    _draw_axis(draw[QUIET], course, (left, top + height), font)
    beside, bar = left + MAP_WIDTH + 16, max(110, min(height, 300)) - 44
    lightest_to_darkest = np.linspace(scale.high, scale.low, bar, dtype=np.float32)
    pixels[top : top + bar, beside : beside + 13] = scale.shade(lightest_to_darkest)[:, None]
    special = [place for place in SPECIAL if (shades == place).any()]
    for number, place in enumerate(special):
        at = top + bar + 8 + number * 13
        pixels[at : at + 10, beside : beside + 10] = place
    _draw_legend(draw[QUIET], scale, (beside, top), bar, [SPECIAL[place] for place in special], font)
    for ink, layer in layers.items():
        strength = np.asarray(layer)
        drawn = strength >= 32  # the weakest shade stands for a quarter of 255, give or take 32
        pixels[drawn] = INK_INDEX[ink] + (strength[drawn] - 32) // 64
    image = Image.fromarray(pixels)
    image.putpalette(_palette())
    return image


@cache
def _palette() -> bytes:
    """Red, green and blue of each index."""
    shares = np.arange(1, STRENGTHS + 1)[:, None] / STRENGTHS
    inks = [share * np.array(ink) + (1 - share) * np.array(PAPER) for ink in INK_INDEX for share in shares]
    colours = [*palette()[:MISSING, :3], MISSING_COLOUR, PAPER, *inks]
    return np.array(colours).round().astype(np.uint8).tobytes()


def _draw_marks(
    draw: ImageDraw.ImageDraw,
    marks: Sequence[Mark],
    row_of: NDArray[np.intp],
    corner: tuple[int, int],
    row_height: int,
    font: Any,
) -> None:
    left, top = corner
    written: list[tuple[float, list[str]]] = []
    for mark in sorted(marks, key=lambda mark: mark.begin):
        begin = left + round(mark.begin * MAP_WIDTH)
        end = max(left + round(mark.end * MAP_WIDTH), begin + 3)
        for first, last in _row_ranges(sorted({int(row_of[row]) for row in mark.rows})):
            box = (begin, top + first * row_height, min(end, left + MAP_WIDTH), top + (last + 1) * row_height)
            draw.rectangle(box, outline=FULL, width=2 if row_height > 3 else 1)
        draw.polygon([(begin - 4, top - 8), (begin + 4, top - 8), (begin, top - 1)], fill=FULL)
        if written and begin - 4 < written[-1][0] + 7 + font.getlength(", ".join(written[-1][1])):
            if mark.text not in written[-1][1]:
                written[-1][1].append(mark.text)
        else:
            written.append((begin, [mark.text]))
    for place, texts in written:
        text = ", ".join(texts)
        # above the marks, which may be close together
        at = max(left, min(place - 4, left + MAP_WIDTH - font.getlength(text)))
        draw.text((at, top - 15), text, fill=FULL, font=font, anchor="lm")


def _row_ranges(rows: Sequence[int]) -> list[tuple[int, int]]:
    """First and last row of each group of neighbours."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row - 1:
            found[-1] = found[-1][0], row
        else:
            found.append((row, row))
    return found


def _draw_axis(draw: ImageDraw.ImageDraw, course: Downsampling, corner: tuple[int, int], font: Any) -> None:
    (left, bottom), (first, last) = corner, course.axis
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        step = round(first + share * (last - first))
        at = left + round(course.share(step) * MAP_WIDTH)
        draw.line([(at, bottom), (at, bottom + 4)], fill=FULL)
        draw.text((at, bottom + 6), f"{step:,}", fill=FULL, font=font, anchor="ma")
    draw.text((left - 8, bottom + 6), "step", fill=FULL, font=font, anchor="ra")


def _draw_legend(
    draw: ImageDraw.ImageDraw,
    scale: ColourScale,
    corner: tuple[int, int],
    height: int,
    special: Iterable[str],
    font: Any,
) -> None:
    """Draw the meaning of the colours, beside the bar and below it."""
    left, top = corner
    for share in (0.0, 0.5, 1.0):
        number = format_power_of_ten(scale.high - share * (scale.high - scale.low))
        draw.text((left + 18, top + 5 + share * (height - 10)), number, fill=FULL, font=font, anchor="lm")
    for line, text in enumerate(special):
        draw.text((left + 14, top + height + 13 + line * 13), text, fill=FULL, font=font, anchor="lm")
