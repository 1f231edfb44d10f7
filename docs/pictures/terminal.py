"""The picture of the terminal in the README: what `gradwatch demo` prints, in headless Chromium.

`python docs/pictures/terminal.py` trains for some seconds in a pseudo-terminal and writes terminal.png beside it.
"""

from __future__ import annotations

import io
import os
import pty
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from report import photograph  # noqa: E402

COLUMNS = 104
"""Of the terminal."""

LINE, LETTER, MARGIN = 20, 8.43, 24
"""Pixels: a line's height, a letter's width at 14 px, and what is left around."""

PAGE = f"""<!doctype html><meta charset="utf-8">
<body style="margin: 0; padding: {MARGIN}px; color: {{foreground}}; background: {{background}}">
<pre style="margin: 0; font: 14px/{LINE}px 'DejaVu Sans Mono', monospace">{{code}}</pre>"""


def printed(command: list[str], columns: int) -> str:
    """What `command` prints on a terminal so wide, escapes and all. Raises RuntimeError where it fails."""
    os.environ |= {"COLUMNS": str(columns), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    taken = io.BytesIO()

    def read(descriptor: int) -> bytes:
        taken.write(piece := os.read(descriptor, 4096))
        return piece

    if pty.spawn(command, read):
        raise RuntimeError(f"{command} failed")
    return taken.getvalue().decode().replace("\r\n", "\n")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        demo = f"from pathlib import Path; from gradwatch.cli.demo_training import demo; demo(Path({folder!r}))"
        lines = printed([sys.executable, "-c", demo], COLUMNS).splitlines()
    begin = next(number for number, line in enumerate(lines) if "2. Unhealthy" in line)
    end = next(number for number, line in enumerate(lines) if "Look at both" in line)
    shown = "\n".join(line for line in lines[begin:end] if "GradWatch report" not in line).rstrip()
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(shown), soft_wrap=True)
    html = console.export_html(theme=DIMMED_MONOKAI, inline_styles=True, code_format=PAGE)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "terminal.html"
        page.write_text(html, encoding="utf-8")
        height = 2 * MARGIN + LINE * (1 + shown.count("\n"))
        photograph(page, HERE / "terminal.png", size=(round(2 * MARGIN + LETTER * COLUMNS), height))
    return 0


if __name__ == "__main__":
    sys.exit(main())
