"""Names and messages as a terminal or a picture can show them."""

from __future__ import annotations

import unicodedata

INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of the characters that move a terminal's cursor, turn the direction of its text or end a line."""


def printable(text: object) -> str:
    """`text` in one line, with escapes for what a terminal acts on: names of folders and layers may contain it."""
    return "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) in INVISIBLE else character
        for character in str(text)
    )
