"""A picture with a palette as a PNG, of which browsers make as large a one as they need (W3C PNG, third edition)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int, int]
"""Red, green, blue, opacity: 0 to 255."""


def png(places: NDArray[np.uint8], palette: Sequence[Colour]) -> bytes:
    """`places` in the palette, shape [height, width], the top row first. tensorboard need not bring Pillow."""
    height, width = places.shape
    colours = np.array(palette, dtype=np.uint8)
    rows = np.zeros((height, 1 + width), dtype=np.uint8)  # each line begins with its filter: none
    rows[:, 1:] = places
    pieces = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours[:, :3].tobytes()),
        (b"tRNS", colours[:, 3].tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_piece(name, data) for name, data in pieces)


def _piece(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
