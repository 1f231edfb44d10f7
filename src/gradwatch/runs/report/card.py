"""The verdict card: an SVG picture of one run, to paste into an issue or a chat. It needs nothing but itself."""

from __future__ import annotations

import textwrap

from gradwatch.runs.names import counted, extent_of, shortened, visible
from gradwatch.runs.pages import render
from gradwatch.runs.report.heatmap import small_map
from gradwatch.runs.report.loss_curve import path_of
from gradwatch.runs.report.run_data import RunData

WIDTH, MAP_HEIGHT, LOSS_HEIGHT = 760, 180, 48
"""Pixels. Judgement: as wide as a column of text in an issue."""

LINE_CHARACTERS, MAX_LINES = 68, 3
"""Characters of a line of the headline, and lines, at most."""

COLOURS = {"error": "#ce2c31", "warning": "#ab6400", "ok": "#218358"}

MAX_MARKS = 12
"""Alerts that are marked, at most."""


def card(data: RunData, *, source: str) -> str:
    """SVG. `source`: the name of the run, for people."""
    verdict, course = data.verdict, data.summary.grad_norm
    serious = data.serious
    said = visible(data.status)
    lines = textwrap.wrap(said, LINE_CHARACTERS, max_lines=MAX_LINES, placeholder=" ...")
    measured = bool(data.summary.names[1:]) and len(course) > 0
    picture, marks = "", []
    if measured:
        picture = small_map(data, MAP_HEIGHT // 2)
        for alert in serious[:MAX_MARKS]:
            if (begin := data.begin(alert)) is not None:
                x = 24 + (WIDTH - 48) * course.share(begin)
                marks.append({"x": f"{x:.1f}", "colour": COLOURS[str(alert.severity)]})
    loss, extent = path_of(data.loss, course) if measured else ("", "")
    top = 34 + 24 * len(lines) + 24
    map_height, loss_height = MAP_HEIGHT if picture else 0, LOSS_HEIGHT if loss else 0
    size = [counted(verdict.layers, "layer"), extent_of(verdict.steps, verdict.run_steps)]
    facts = [*size, f"overhead {100 * verdict.overhead:.1f} %"]
    model = data.meta.get("about", {}).get("model", "")
    return render(
        "card.svg",
        title=said,
        made_from="the record of the run",
        width=WIDTH,
        height=top + map_height + (22 if picture else 0) + (loss_height + 22 if loss else 0) + 16,
        top=top,
        colour=COLOURS[str(serious[0].severity) if serious else "ok"],
        headline=lines,
        facts="  ·  ".join(filter(None, [shortened(source, 40), shortened(model, 40), *facts])),
        picture=picture,
        map_height=map_height,
        marks=marks,
        loss=loss,
        columns=len(course),
        loss_height=loss_height,
        extent=extent,
    )
