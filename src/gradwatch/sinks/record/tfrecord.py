"""The TFRecord framing of TensorBoard's event files: each event with its length and the checksums of both.

A frame is 8 bytes of length, 4 of their checksum, the data, 4 of its checksum; little-endian (TFRecord). A checksum
is a masked CRC-32C (Castagnoli; RFC 3720, appendix B.4), "((crc >> 15) | (crc << 17)) + 0xa282ead8".

tensorboard computes it byte by byte in Python, 0.1 us each (measured). Here it is one table lookup per byte in numpy. A
CRC is linear: the CRC of a line of bytes is the exclusive or of each byte's contribution at its position.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from functools import cache
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

LINE_BYTES, MAX_LINES = 256, 256
"""Bytes of a line, whose table has 256 KiB, and lines that are looked up at once, at most."""

IN_LINE = np.arange(LINE_BYTES) * 256
"""Offset in the table of each position in a line."""

POLYNOMIAL = 0x82F63B78
"""Castagnoli's polynomial, bits reversed (RFC 3720)."""

SMALL_DATA = 16
"""Bytes up to which a plain loop is faster than numpy's calls (measured)."""

MASK = 0xA282EAD8
"""The constant of TFRecord's masked checksums."""

MAX_EVENT_BYTES = 1 << 30
"""Bytes of an event, at most: protobuf reads no more than 2 GiB. Judgement."""

READ = 64 * 2**20
"""Bytes up to which an event is read. None of ours has more; of another's the length is enough."""

HEADER, CHECK = struct.Struct("<Q"), struct.Struct("<I")


class Damaged(Exception):  # noqa: N818 (the state of the file)
    """A frame that cannot be read: `torn` if the file ends within it, as after a kill."""

    def __init__(self, position: int, *, torn: bool) -> None:
        super().__init__(f"{'torn' if torn else 'damaged'} at byte {position:,}")
        self.position = position
        self.torn = torn


def framed(data: bytes) -> bytes:
    """`data` as a frame."""
    length = HEADER.pack(len(data))
    return b"".join((length, CHECK.pack(checksum(length)), data, CHECK.pack(checksum(data))))


def frames(file: BinaryIO) -> Iterator[bytes | None]:
    """The data of each frame from here on: None where the checksum is wrong, empty where it has more than `READ` bytes.

    Raises Damaged where it must end.
    """
    position = file.tell()
    while head := file.read(12):
        if len(head) < 12:
            raise Damaged(position, torn=True)
        length: int = HEADER.unpack_from(head)[0]
        if CHECK.unpack_from(head, 8)[0] != checksum(head[:8]) or length > MAX_EVENT_BYTES:
            raise Damaged(position, torn=False)
        if length > READ:
            position += 16 + length
            if file.seek(0, os.SEEK_END) < position:
                raise Damaged(position - 16 - length, torn=True)
            file.seek(position)
            yield b""
            continue
        rest = file.read(length + 4)
        if len(rest) < length + 4:
            raise Damaged(position, torn=True)
        data = rest[:length]
        position += 16 + length
        yield data if CHECK.unpack_from(rest, length)[0] == checksum(data) else None


def checksum(data: bytes) -> int:
    """Masked CRC-32C."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + MASK) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    if len(data) <= SMALL_DATA:
        register, bytes_ = 0xFFFFFFFF, _bytes_list()
        for byte in data:
            register = (register >> 8) ^ bytes_[(register ^ byte) & 0xFF]
        return register ^ 0xFFFFFFFF
    padded = np.zeros(-(-len(data) // LINE_BYTES) * LINE_BYTES, dtype=np.uint8)
    own = padded[-len(data) :]  # zeros before it change nothing
    own[:] = np.frombuffer(data, dtype=np.uint8)
    own[:4] ^= 0xFF  # the register begins with ones
    lines = padded.reshape(-1, LINE_BYTES)
    first, second, third, fourth = _begin_of_line()
    register = 0
    for begin in range(0, len(lines), MAX_LINES):
        places = lines[begin : begin + MAX_LINES] + IN_LINE
        for line in np.bitwise_xor.reduce(_places_table().take(places), axis=1).tolist():
            # the bytes of the register act like the first four bytes of the next line
            low, high = first[register & 0xFF] ^ second[register >> 8 & 0xFF], fourth[register >> 24]
            register = line ^ low ^ third[register >> 16 & 0xFF] ^ high
    return register ^ 0xFFFFFFFF


@cache
def _bytes_table() -> NDArray[np.uint32]:
    """Shape [256]: the register after each byte, starting from 0."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    return table


@cache
def _bytes_list() -> list[int]:
    numbers: list[int] = _bytes_table().tolist()
    return numbers


@cache
def _places_table() -> NDArray[np.uint32]:
    """Shape [LINE_BYTES * 256]: the contribution of each byte at each position of a line."""
    table, one = np.empty((LINE_BYTES, 256), dtype=np.uint32), _bytes_table()
    table[-1] = one
    for position in range(LINE_BYTES - 2, -1, -1):
        after = table[position + 1]
        table[position] = (after >> np.uint32(8)) ^ one[after & np.uint32(0xFF)]
    return table.ravel()


@cache
def _begin_of_line() -> list[list[int]]:
    """The contribution of each byte at each of the first four positions of a line."""
    found: list[list[int]] = _places_table().reshape(LINE_BYTES, 256)[:4].tolist()
    return found
