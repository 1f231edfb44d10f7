"""Names and messages as a terminal, a page or a picture can show them."""

from __future__ import annotations

import unicodedata

INVISIBLE = frozenset({"Cc", "Cf", "Cn", "Cs", "Zl", "Zp"})
"""Unicode categories of the characters that move a terminal's cursor, turn or hide the text beside them or end a line,
or that XML cannot hold.
"""


def printable(text: object, *, kept: frozenset[str] = frozenset()) -> str:
    """`text` in one line, with escapes for what a terminal or page acts on: names of folders and layers may contain it.
    `kept`: characters that are left as they are.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in INVISIBLE and character not in kept
        else character
        for character in shown
    )
