"""Draws docs/pictures/way_of_a_number.svg, from `p.grad` to an alert: `python docs/pictures/way_of_a_number.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path

STATIONS = (
    ("p.grad", "at the step, after backward", "your gradients, as the optimizer is about to use them"),
    ("norms", "measure/reductions.py", "a few fused kernels read each gradient once"),
    ("device buffer", "measure/device_buffer.py", "one row a step, on the device; nothing waits"),
    ("block", "engine/block_builder.py", "64 steps or 1 s, brought to the host in one copy"),
    ("history", "core/history.py", "the recent rows, by statistic and layer"),
    ("rules", "rules/", "each finds one fault and the step at which it began"),
    ("incidents", "rules/incidents.py", "opened once, closed once; effects go under their cause"),
    ("sinks", "sinks/", "log, TensorBoard, record, report"),
)
"""Name, where, what happens."""

WIDTH, ROW, BOX, LEFT, TOP = 760, 58, 170, 20, 20
"""Pixels: the picture's width, a row's height, a box's width, the margins."""
DEVICE, HOST, INK = "#2b6f9e", "#3d7a4f", "#444"
ON_DEVICE = 3
"""Stations on the device; the others are on the host."""


def drawn() -> str:
    height = 2 * TOP + ROW * len(STATIONS) - 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, (name, where, what) in enumerate(STATIONS):
        y, colour = TOP + ROW * number, DEVICE if number < ON_DEVICE else HOST
        middle = LEFT + BOX / 2
        parts += [
            f'<rect x="{LEFT}" y="{y}" width="{BOX}" height="40" rx="6" fill="{colour}"/>',
            f'<text x="{middle}" y="{y + 25}" fill="white" text-anchor="middle" font-weight="bold">'
            f"{escape(name)}</text>",
            f'<text x="{LEFT + BOX + 20}" y="{y + 17}">{escape(what)}</text>',
            f'<text x="{LEFT + BOX + 20}" y="{y + 35}" font-family="monospace" font-size="11">{escape(where)}</text>',
        ]
        if number + 1 < len(STATIONS):
            parts.append(f'<path d="M{middle} {y + 41} v12 m-4 -5 l4 5 l4 -5" stroke="{INK}" fill="none"/>')
    x = WIDTH - 130
    for y, colour, words in ((TOP + 8, DEVICE, "on the device"), (TOP + 30, HOST, "on the host")):
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{words}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawn(), encoding="utf-8")
