"""What `--help` says around the options: what a command does, examples, and what its exit codes mean."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from textwrap import fill
from typing import Any

WIDTH = 79
"""Columns of a line."""


def worded(
    description: str, *, examples: Mapping[str, str], exits: Mapping[str, str], more: str = ""
) -> dict[str, Any]:
    """Arguments for `add_parser`; `examples`: what to type, and what for; `exits`: code, and what it means."""
    parts = [fill(more, WIDTH)] if more else []
    # what to type stands on a line of its own, to be copied
    shown = "\n".join(f"  {command}\n      {purpose}" for command, purpose in examples.items())
    parts.append(f"examples:\n{shown}")
    codes = "\n".join(
        fill(meaning, WIDTH, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7)
        for code, meaning in exits.items()
    )
    parts.append(f"exit codes:\n{codes}")
    return {
        "description": fill(description, WIDTH),
        "epilog": "\n\n".join(parts),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
