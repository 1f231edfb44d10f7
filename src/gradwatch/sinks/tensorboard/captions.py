"""Text under a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.printable import printable

LETTERS, LINE_HEIGHT, MARGIN, MAX_LINES = 13, 18, 6, 4
"""Pixels of a caption's letters, lines and margin, and lines of a text, at most."""


def captioned(picture: NDArray[np.uint8], lines: Sequence[str], *, below: Sequence[str] = ()) -> NDArray[np.uint8]:
    """A picture [height, width, 3] of bytes with text under it: `below`, a text for each of its columns of equal width,
    then `lines`, each as wide as the picture at most.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width, _ = picture.shape
    font: Any = ImageFont.load_default(size=LETTERS)
    texts = [piece for line in lines for piece in _wrapped(printable(line), font, width - 2 * MARGIN)]
    rows = len(texts) + bool(below)
    whole = Image.new("RGB", (width, height + rows * LINE_HEIGHT + 2 * MARGIN), "white")
    whole.paste(Image.fromarray(picture), (0, 0))
    draw = ImageDraw.Draw(whole)
    for column, text in enumerate(below):
        place = (column + 0.5) * width / len(below)
        draw.text((place, height + MARGIN), printable(text), fill="black", font=font, anchor="ma")
    for row, text in enumerate(texts, bool(below)):
        draw.text((MARGIN, height + MARGIN + row * LINE_HEIGHT), text, fill="black", font=font)
    return np.asarray(whole)


def _wrapped(text: str, font: Any, width: float) -> list[str]:
    """`text` in as many lines as it takes, `MAX_LINES` at most; a longer word loses its beginning."""
    found: list[str] = []
    for word in text.split():
        while font.getlength(word) > width and len(word) > 4:
            word = f"...{word[4:].removeprefix('...')}"
        longer = f"{found[-1]} {word}" if found else word
        if found and font.getlength(longer) > width:
            found.append(word)
        else:
            found[-1:] = [longer]
    return found[:MAX_LINES]
