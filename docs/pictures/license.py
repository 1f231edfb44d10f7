"""Draws docs/pictures/license.svg, the badge of the license in the README: `python docs/pictures/license.py`."""

from __future__ import annotations

from pathlib import Path

LABEL, LICENSE = "license", "Apache-2.0"
LETTER, HEIGHT, PADDING = 6.6, 20, 7
"""Pixels: a letter's width at 11 px, the height, what is left beside the words."""


def drawn() -> str:
    left, right = (round(len(words) * LETTER + 2 * PADDING) for words in (LABEL, LICENSE))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HEIGHT}" role="img">
<title>{LABEL}: {LICENSE}</title>
<rect width="{left + right}" height="{HEIGHT}" rx="3" fill="#555"/>
<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1 -3 3h-{right - 3}z" fill="#2b6f9e"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11">
<text x="{left / 2}" y="14">{LABEL}</text>
<text x="{left + right / 2}" y="14">{LICENSE}</text>
</g>
</svg>
"""


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawn(), encoding="utf-8")
