"""The frames of an event file, against tensorboard's own writer and reader."""

from __future__ import annotations

import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from gradwatch.sinks.record.tfrecord import LINE_BYTES, MAX_LINES, SMALL_DATA, Damaged, checksum, crc32c, framed, frames

BLOCK = LINE_BYTES * MAX_LINES


@given(st.binary(max_size=5 * LINE_BYTES))
@example(b"x" * SMALL_DATA)
@example(b"x" * (SMALL_DATA + 1))
@example(bytes(range(256)) * (2 * BLOCK // 256))
@example(b"x" * (BLOCK - LINE_BYTES))
@example(b"x" * (BLOCK + 1))
@example(b"x" * (BLOCK + 3))
@example(b"x" * (BLOCK + 4))
def test_the_checksum_is_tensorboards(data: bytes) -> None:
    assert checksum(data) == masked_crc32c(data)


def test_the_checksum_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283, "RFC 3720 has it so"


@given(st.lists(st.binary(max_size=300)))
def test_what_is_framed_comes_back(pieces: list[bytes]) -> None:
    assert list(frames(io.BytesIO(b"".join(map(framed, pieces))))) == pieces


@pytest.mark.parametrize("cut", range(1, len(framed(b"abc"))))
def test_a_torn_tail_is_known_wherever_it_is_torn(cut: int) -> None:
    whole = framed(b"first")
    reported = frames(io.BytesIO(whole + framed(b"abc")[:cut]))
    assert next(reported) == b"first"
    with pytest.raises(Damaged) as damage:
        next(reported)
    assert damage.value.torn
    assert damage.value.position == len(whole)


@pytest.mark.parametrize("place", range(len(framed(b"abc"))))
def test_a_flipped_bit_is_found_wherever_it_is(place: int) -> None:
    bad = bytearray(framed(b"abc"))
    bad[place] ^= 4
    reported = frames(io.BytesIO(bytes(bad) + framed(b"after")))
    if place < 12:  # no one knows where the next begins
        with pytest.raises(Damaged, match="damaged at byte 0"):
            next(reported)
    else:
        assert list(reported) == [None, b"after"]
