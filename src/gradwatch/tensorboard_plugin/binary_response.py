"""The binary format in which arrays are sent to the browser: one body, which begins with a header that lists them.

    uint32      length of the header in bytes
    header      JSON: the fields of the answer, and `arrays`: name -> [type, shape, offset from the header's end]
    arrays      little-endian, row by row, each at a multiple of 8 bytes from the body's beginning

JSON would turn NaN into text, and take five times as long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

TYPES = {"<f4": "float32", "<f8": "float64", "|u1": "uint8"}
"""What numpy calls a type: what JavaScript calls its array."""

ALIGNMENT = 8
"""Bytes; JavaScript's arrays must begin at a multiple of their element's size."""


def pack_arrays(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """`about` (what JSON can say) and `arrays` (float32, float64 or uint8) as one body."""
    contents, parts, place = {}, [], 0
    for name, array in arrays.items():
        contents[name] = [TYPES[array.dtype.newbyteorder("<").str], list(array.shape), place]
        parts.append(array.tobytes().ljust(_padded(array.nbytes), b"\0"))
        place += _padded(array.nbytes)
    header = json.dumps({**about, "arrays": contents}).encode()
    header = header.ljust(_padded(4 + len(header)) - 4)
    return b"".join([len(header).to_bytes(4, "little"), header, *parts])


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
