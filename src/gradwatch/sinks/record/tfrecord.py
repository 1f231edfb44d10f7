"""TensorBoard's event file, byte by byte: each event in a frame with its length, and a checksum of each.

A frame is 8 bytes of length, 4 of their checksum, the data, 4 of its checksum; little-endian (TFRecord). A checksum
is a masked CRC-32C (Castagnoli; RFC 3720, appendix B.4), "((crc >> 15) | (crc << 17)) + 0xa282ead8".

tensorboard computes it byte by byte in Python, 0.1 us each (measured). Here it is one lookup per byte in numpy: a CRC
is linear, so that of a line of bytes is the exclusive or of what each gives at its place in the line, and that of many
lines the exclusive or of what each of theirs becomes by the bytes behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

LINE, LINES = 64, 256
"""Bytes of a line, and how many lines are looked up at once. Their tables have 64 KiB and 1 MiB; of the second, four
numbers a line are used."""

IN_LINE = np.arange(LINE) * 256
AFTER_LINES = np.arange(LINES)[::-1, None] * 1024 + np.arange(4) * 256
"""Where in the tables the numbers of each place begin."""

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, bits reversed (RFC 3720)."""

FEW = 16
"""Bytes up to which a plain loop is faster than numpy's calls (measured)."""

MASK = 0xA282EAD8
"""TFRecord's."""

LONGEST = 1 << 30
"""Bytes that an event can have at most: protobuf reads no more than 2 GiB. Judgement."""

HEADER, CHECK = struct.Struct("<Q"), struct.Struct("<I")


class Damaged(Exception):  # noqa: N818 (it says what the file is)
    """A frame that cannot be read: `torn` where the file ends within it, as after a kill."""

    def __init__(self, place: int, *, torn: bool) -> None:
        super().__init__(f"{'torn' if torn else 'damaged'} at byte {place:,}")
        self.place = place
        self.torn = torn


def framed(data: bytes) -> bytes:
    """`data` as a frame."""
    length = HEADER.pack(len(data))
    return b"".join((length, CHECK.pack(checksum(length)), data, CHECK.pack(checksum(data))))


def frames(file: BinaryIO) -> Iterator[bytes | None]:
    """The data of each frame from here on, None for one whose checksum is wrong. Raises Damaged where it must end."""
    place = file.tell()
    while head := file.read(12):
        if len(head) < 12:
            raise Damaged(place, torn=True)
        length: int = HEADER.unpack_from(head)[0]
        if CHECK.unpack_from(head, 8)[0] != checksum(head[:8]) or length > LONGEST:
            raise Damaged(place, torn=False)
        rest = file.read(length + 4)
        if len(rest) < length + 4:
            raise Damaged(place, torn=True)
        data = rest[:length]
        place += 16 + length
        yield data if CHECK.unpack_from(rest, length)[0] == checksum(data) else None


def checksum(data: bytes) -> int:
    """Masked CRC-32C."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + MASK) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    register, done = 0xFFFFFFFF, 0
    if len(data) > FEW:
        numbers = np.frombuffer(data, dtype=np.uint8)
        while len(data) - done >= 4:
            block = numbers[done : done + LINE * LINES]
            done += len(block)
            bytes_of_lines = np.zeros(-(-len(block) // LINE) * LINE, dtype=np.uint8)
            bytes_of_lines[-len(block) :] = block  # zeros before it change nothing
            begin = bytes_of_lines[-len(block) :][:4]
            begin ^= np.frombuffer(CHECK.pack(register), dtype=np.uint8)  # what came before goes on in these
            register = _of_lines(bytes_of_lines.reshape(-1, LINE))
    for byte in data[done:]:
        register = (register >> 8) ^ _bytes_list()[(register ^ byte) & 0xFF]
    return register ^ 0xFFFFFFFF


def _of_lines(lines: NDArray[np.uint8]) -> int:
    """What `lines` make of an empty register: shape [lines, LINE]."""
    places, shifts = _places_table(), _shifts_table()
    registers = np.bitwise_xor.reduce(places.take(lines + IN_LINE), axis=1).astype("<u4")
    parts = registers.view(np.uint8).reshape(-1, 4) + AFTER_LINES[-len(lines) :]
    return int(np.bitwise_xor.reduce(shifts.take(parts), axis=None))


@cache
def _bytes_table() -> NDArray[np.uint32]:
    """[256]: what each byte makes of an empty register."""
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
    """[LINE * 256]: what each byte gives at each place of a line, the last place last."""
    table, one = np.empty((LINE, 256), dtype=np.uint32), _bytes_table()
    table[-1] = one
    for place in range(LINE - 2, -1, -1):
        after = table[place + 1]
        table[place] = (after >> np.uint32(8)) ^ one[after & np.uint32(0xFF)]
    return table.ravel()


@cache
def _shifts_table() -> NDArray[np.uint32]:
    """[LINES * 4 * 256]: what each byte of a register, the lowest first, becomes after so many lines of zeros."""
    table = np.empty((LINES, 4, 256), dtype=np.uint32)
    table[0] = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    # a line of zeros takes the bytes of a register as the line's first four
    table[1] = _places_table().reshape(LINE, 256)[:4]
    lines = 1
    while lines < LINES:  # as many lines again
        further = table[1 : min(lines + 1, LINES - lines)]
        parts = [table[lines, part].take((further >> (8 * part)) & 0xFF) for part in range(4)]
        table[lines + 1 : lines + 1 + len(further)] = np.bitwise_xor.reduce(parts)
        lines *= 2
    return table.ravel()
