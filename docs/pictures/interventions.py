"""Draws docs/pictures/interventions.svg: the losses of the examples of interventions, as they were and with them.

python docs/pictures/interventions.py
"""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"

WIDTH, HEIGHT, LEFT, TOP, BETWEEN = 300, 170, 46, 58, 62
"""Of a panel's axes, and what is left, above and between, in pixels."""

BEFORE, AFTER, INK, FAINT = "#c8553d", "#2b6f9e", "#444", "#ddd"

PANELS = {
    "clip": ("Clip(0.5)", "a recurrent net whose gradients explode"),
    "spike_clip": ("SpikeClip()", "40 layers, two batches at 30 times the gain"),
    "skip_nonfinite": ("SkipNonFinite()", "3 of 300 batches hold a NaN"),
}
"""Example -> the intervention, and what it is for."""


class Losses(NamedTuple):
    """Of the two trainings of an example, one number a step."""

    before: Sequence[float]
    after: Sequence[float]
    said: str
    """What they came to on held-out digits."""


def losses_of(example: str) -> Losses:
    """Run the example as a user would."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        names = runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    finally:
        sys.path.remove(str(EXAMPLES))
    said = f"reads {names['before']:.0%} of held-out digits without, {names['after']:.0%} with"
    return Losses(names["unhealthy_losses"], names["fixed_losses"], said)


def panel(left: float, title: str, subtitle: str, losses: Losses) -> list[str]:
    known = [loss for run in losses[:2] for loss in run if 0 < loss < math.inf]
    low, high = math.floor(math.log10(min(known))), min(3, math.ceil(math.log10(max(known))))
    low, steps = max(low, -3), max(len(losses.before), len(losses.after))

    def place(step: int, loss: float) -> str:
        share = (min(max(math.log10(loss), low), high) - low) / (high - low)
        return f"{left + WIDTH * step / steps:.1f},{TOP + HEIGHT * (1 - share):.1f}"

    parts = [
        f'<text x="{left}" y="20" class="title">{title}</text>',
        f'<text x="{left}" y="38">{subtitle}</text>',
        f'<text x="{left}" y="{TOP + HEIGHT + 38}">{losses.said}</text>',
    ]
    for power in range(low, high + 1):
        y = TOP + HEIGHT * (1 - (power - low) / (high - low))
        parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y}" y2="{y}" stroke="{FAINT}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>')
    for step in range(0, steps, 100):
        x = left + WIDTH * step / steps
        parts.append(f'<text x="{x}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{step}</text>')
    for run, colour in ((losses.before, BEFORE), (losses.after, AFTER)):
        piece: list[str] = []
        marked = False
        for step, loss in enumerate(run):
            if 0 < loss < math.inf:
                piece.append(place(step, loss))
                continue
            parts.append(_line(piece, colour))
            if piece and not marked and colour == BEFORE:
                x, y = piece[-1].split(",")
                parts.append(f'<text x="{x}" y="{float(y) - 6}" fill="{colour}" class="mark">NaN from here on</text>')
                marked = True
            piece = []
        parts.append(_line(piece, colour))
    return parts


def _line(points: Sequence[str], colour: str) -> str:
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.2"/>' if points else ""


def drawn(runs: dict[str, Losses]) -> str:
    width = LEFT + len(runs) * (WIDTH + BETWEEN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + 74}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">',
        "<style>.title { font-size: 14px; font-weight: bold; } .mark { font-size: 10px; }</style>",
        f'<rect width="{width}" height="{TOP + HEIGHT + 74}" fill="white"/>',
    ]
    for number, (example, losses) in enumerate(runs.items()):
        parts += panel(LEFT + number * (WIDTH + BETWEEN), *PANELS[example], losses)
    y = TOP + HEIGHT + 62
    for x, colour, words in ((LEFT, BEFORE, "training loss as it was"), (LEFT + 190, AFTER, "with the intervention")):
        parts.append(f'<line x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="{y}">{words}</text>')
    return "\n".join([*filter(None, parts), "</svg>"]) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {example: losses_of(example) for example in PANELS if (EXAMPLES / f"{example}.py").exists()}
    (HERE / "interventions.svg").write_text(drawn(found), encoding="utf-8")
