"""What a command ends with: its exit code, and the one line where it cannot do what was asked."""

from __future__ import annotations

import sys

OK, ALERTS, MISUSE = 0, 1, 2


def complain(command: str, message: object) -> int:
    """One line on stderr; the exit code of misuse."""
    print(f"gradwatch {command}: {message}", file=sys.stderr)
    return MISUSE
