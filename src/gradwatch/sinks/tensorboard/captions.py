"""Text of a picture, in lines that fit, and captions: text under it."""

from __future__ import annotations

from bisect import bisect_left
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
    texts = [piece for line in lines for piece in wrapped_to_pixels(line, font, width - 2 * MARGIN, MAX_LINES)]
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


def wrapped_to_pixels(text: str, font: Any, width: float, most: int) -> list[str]:
    """`text` in lines of `width` pixels, `most` at most; a longer word loses its beginning."""
    lines: list[str] = []
    for word in printable(text).split():
        word = _end_of(word, font, width)
        longer = f"{lines[-1]} {word}" if lines else word
        if not lines or font.getlength(longer) <= width:
            lines[-1:] = [longer]
        elif len(lines) < most:
            lines.append(word)
        else:
            while font.getlength(f"{lines[-1]} ...") > width and " " in lines[-1]:
                lines[-1] = lines[-1].rpartition(" ")[0]
            lines[-1] = _end_of(f"{lines[-1]} ...", font, width)
            break
    return lines


def _end_of(text: str, font: Any, width: float) -> str:
    """`text` without its beginning where it is wider than `width` pixels."""
    if font.getlength(text) <= width:
        return text
    first = bisect_left(range(len(text)), True, key=lambda first: font.getlength(f"...{text[first:]}") <= width)
    return f"...{text[first:]}"
