"""What of docs/command_line.md is made and not written: the help of each command. `make pages` writes it."""

from __future__ import annotations

import os
import re
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

from alert_pages import block, with_block
from gradwatch.cli import COMMANDS, main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command_line.md"
NAMES = tuple(command.__name__.rpartition(".")[2] for command in COMMANDS)


def help_of(command: str) -> str:
    """What `gradwatch COMMAND --help` prints on a terminal of 100 columns."""
    before, out = os.environ.get("COLUMNS"), StringIO()
    os.environ["COLUMNS"] = "100"
    try:
        with redirect_stdout(out), suppress(SystemExit):
            main([command, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return out.getvalue().rstrip()


def same_words(text: str) -> str:
    """Without what differs between versions of Python: line breaks, and `-o FILE, --out FILE` for `-o, --out FILE`."""
    return " ".join(re.sub(r"(-\w) [A-Z]+, (--\w)", r"\1, \2", text).split())


def said(text: str, command: str) -> str:
    """What the page says that the command's help is."""
    return block(text, f"help of {command}").removeprefix("```text\n").removesuffix("\n```")


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for name in NAMES:
        page = with_block(page, f"help of {name}", f"```text\n{help_of(name)}\n```")
    PAGE.write_text(page, encoding="utf-8")
