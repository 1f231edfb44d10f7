"""The TFRecord framing of TensorBoard's event files: each event with its length and the checksums of both.

A frame is 8 bytes of length, 4 of their checksum, the data, 4 of its checksum; little-endian (TFRecord). A checksum
is a masked CRC-32C (Castagnoli; RFC 3720, appendix B.4), "((crc >> 15) | (crc << 17)) + 0xa282ead8".

tensorboard computes it byte by byte in Python, 0.1 us each (measured). Here it is one table lookup per byte in numpy. A
CRC is linear: the CRC of a line of bytes is the exclusive or of each byte's contribution at its position, and the CRC
of many lines is the exclusive or of the lines' CRCs, each shifted by the lines after it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from functools import cache
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

LINE_BYTES, MAX_LINES = 64, 256
"""Bytes of a line, and lines that are looked up at once, at most. Their tables have 64 KiB and 1 MiB."""

IN_LINE = np.arange(LINE_BYTES) * 256
AFTER_LINES = np.arange(MAX_LINES)[::-1, None] * 1024 + np.arange(4) * 256
"""Offsets in the tables of each position in a line, and of each number of following lines."""

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
    register, done = 0xFFFFFFFF, 0
    if len(data) > SMALL_DATA:
        numbers = np.frombuffer(data, dtype=np.uint8)
        while len(data) - done >= 4:
            block = numbers[done : done + LINE_BYTES * MAX_LINES]
            done += len(block)
            bytes_of_lines = np.zeros(-(-len(block) // LINE_BYTES) * LINE_BYTES, dtype=np.uint8)
            bytes_of_lines[-len(block) :] = block  # zeros before it change nothing
            begin = bytes_of_lines[-len(block) :][:4]
            begin ^= np.frombuffer(CHECK.pack(register), dtype=np.uint8)  # continues the CRC of earlier blocks
            register = _crc_of_lines(bytes_of_lines.reshape(-1, LINE_BYTES))
    for byte in data[done:]:
        register = (register >> 8) ^ _bytes_list()[(register ^ byte) & 0xFF]
    return register ^ 0xFFFFFFFF


def _crc_of_lines(lines: NDArray[np.uint8]) -> int:
    """The register after `lines`, starting from 0: shape [lines, LINE_BYTES]."""
    places, shifts = _places_table(), _shifts_table()
    registers = np.bitwise_xor.reduce(places.take(lines + IN_LINE), axis=1).astype("<u4")
    parts = registers.view(np.uint8).reshape(-1, 4) + AFTER_LINES[-len(lines) :]
    return int(np.bitwise_xor.reduce(shifts.take(parts), axis=None))


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
def _shifts_table() -> NDArray[np.uint32]:
    """Shape [MAX_LINES * 4 * 256]: each byte of a register, the lowest first, after so many lines of zeros."""
    table = np.empty((MAX_LINES, 4, 256), dtype=np.uint32)
    table[0] = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    # the bytes of a register act like the first four bytes of a line
    table[1] = _places_table().reshape(LINE_BYTES, 256)[:4]
    lines = 1
    while lines < MAX_LINES:  # doubles the number of lines
        further = table[1 : min(lines + 1, MAX_LINES - lines)]
        parts = [table[lines, part].take((further >> (8 * part)) & 0xFF) for part in range(4)]
        table[lines + 1 : lines + 1 + len(further)] = np.bitwise_xor.reduce(parts)
        lines *= 2
    return table.ravel()
