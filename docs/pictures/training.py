"""Draws docs/pictures/training.svg, which moves: examples/vanishing.py with its fault, the alert, the fix, and without.

`python docs/pictures/training.py` trains for some seconds. Lines, numbers and the code are those of the run.
"""

from __future__ import annotations

import logging
import sys
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import vanishing  # noqa: E402

COLUMNS, LETTER, LINE, MARGIN = 108, 7.85, 21, 18
"""Of the terminal; pixels: a letter's width at 13 px, a line's height, what is left around."""
SECONDS = 16.0
"""Until it begins again."""
PAPER, INK, FAINT, GOOD, WARN, BAD = "#1e2227", "#d7dae0", "#7f848e", "#89ca78", "#e5c07b", "#ef596f"


class Kept(logging.Handler):
    """Keeps what GradWatch logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def trained(*, fixed: bool) -> tuple[list[str], str, float]:
    """The lines of the log, the verdict's first words, the share of held-out digits that are read."""
    log, kept = logging.getLogger("gradwatch"), Kept()
    log.addHandler(kept)
    try:
        silent: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        watch, accuracy = vanishing.train(fixed=fixed, **silent)
    finally:
        log.removeHandler(kept)
    return kept.lines, str(watch.verdict).split(".")[0], accuracy


def change() -> tuple[str, list[str]]:
    """The line of the example that is wrong, and those that are right."""
    source = Path(vanishing.__file__).read_text(encoding="utf-8")
    (line,) = [line.strip() for line in source.splitlines() if "nn.Sigmoid()" in line and "fixed" in line]
    right, _, wrong = line.partition(" if fixed else ")
    begin = right[: right.index("nn.ReLU")]
    (weights,) = [line.strip() for line in source.splitlines() if "kaiming_normal_(" in line]
    return begin + wrong, [weights, right + wrong[len("nn.Sigmoid()") :]]


def drawn(script: list[tuple[float, str, str]]) -> str:
    """`script`: when a line appears, in seconds; its colour; its text. The text "bar" is a bar that fills."""
    width, height = round(COLUMNS * LETTER + 2 * MARGIN), LINE * len(script) + 2 * MARGIN
    style, parts = [], []
    for number, (at, colour, text) in enumerate(script):
        share = 100 * at / SECONDS
        style.append(
            f"@keyframes l{number} {{ 0%, {share:.1f}% {{ opacity: 0 }} {share + 0.5:.1f}%, 97% {{ opacity: 1 }} "
            f"100% {{ opacity: 0 }} }} .l{number} {{ animation: l{number} {SECONDS:g}s infinite }}"
        )
        y = MARGIN + LINE * number + 15
        if text != "bar":
            text = "\N{NO-BREAK SPACE}" * (len(text) - len(text.lstrip())) + text.lstrip()
            parts.append(f'<text class="l{number}" x="{MARGIN}" y="{y}" fill="{colour}">{escape(text)}</text>')
            continue
        done = share + 100 * 1.8 / SECONDS
        style.append(
            f"@keyframes b{number} {{ 0%, {share:.1f}% {{ transform: scaleX(0) }} "
            f"{done:.1f}%, 100% {{ transform: scaleX(1) }} }} .b{number} {{ animation: b{number} {SECONDS:g}s infinite "
            f"linear; transform-origin: {MARGIN + 80}px }}"
        )
        parts.append(
            f'<g class="l{number}"><text x="{MARGIN}" y="{y}" fill="{FAINT}">training</text>'
            f'<rect x="{MARGIN + 80}" y="{y - 8}" width="360" height="6" rx="3" fill="#3b4048"/>'
            f'<rect class="b{number}" x="{MARGIN + 80}" y="{y - 8}" width="360" height="6" rx="3" fill="{colour}"/></g>'
        )
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" '
                'font-family="\'DejaVu Sans Mono\', Menlo, Consolas, monospace" font-size="13" xml:space="preserve">',
                "<style>",
                *style,
                "</style>",
                f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
                *parts,
                "</svg>",
            ]
        )
        + "\n"
    )


def main() -> None:
    said, _, before = trained(fixed=False)
    _, healthy, after = trained(fixed=True)
    wrong, right = change()
    first = next(number for number, line in enumerate(said) if "WARNING" in line)
    script = [
        (0.3, INK, "$ python vanishing.py"),
        (0.8, GOOD, "bar"),
        (1.2, WARN, said[first]),
        (1.2, WARN, said[first + 1]),
        (3.4, INK, f"reads {before:.0%} of the digits that it never saw; guessing reads 10%"),
        (5.0, INK, ""),
        (5.5, BAD, f"- {wrong}"),
        *((6.5, GOOD, f"+ {line}") for line in right),
        (7.5, INK, ""),
        (8.0, INK, "$ python vanishing.py"),
        (8.5, GOOD, "bar"),
        (11.0, GOOD, healthy),
        (11.4, INK, f"reads {after:.0%} of the digits that it never saw"),
    ]
    Path(__file__).with_suffix(".svg").write_text(drawn(script), encoding="utf-8")


if __name__ == "__main__":
    main()
