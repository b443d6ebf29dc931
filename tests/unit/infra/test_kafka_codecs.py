"""Contents of batches, unpacked up to a bound and never past it."""

from __future__ import annotations

import tracemalloc

import cramjam
import pytest

from infra.kafka_codecs import GZIP, LZ4, NAMES, SNAPPY, ZSTD, NotUnpacked, unpack
from tests.raw_batches import PACK, snappy_raw

MIB = 1024 * 1024
CODECS = pytest.mark.parametrize("codec", NAMES, ids=NAMES.get)


@CODECS
@pytest.mark.parametrize("size", [1, 1000, 70_000, MIB])
def test_what_was_packed_is_unpacked(codec: int, size: int) -> None:
    contents = bytes(i * i % 251 for i in range(1000)) * (size // 1000 + 1)
    assert unpack(codec, PACK[codec](contents[:size]), max_bytes=MIB) == contents[:size]


@CODECS
def test_a_byte_more_than_the_bound_is_refused(codec: int) -> None:
    with pytest.raises(NotUnpacked, match=f"more than {MIB} bytes"):
        unpack(codec, PACK[codec](bytes(MIB + 1)), max_bytes=MIB)


def bomb(codec: int) -> bytes:
    """Some kilobytes that say half a gigabyte."""
    one = PACK[codec](bytes(16 * MIB))
    return one + one[16:] * 31 if codec == SNAPPY else one * 32


@CODECS
def test_nothing_past_the_bound_is_ever_held(codec: int) -> None:
    packed = bomb(codec)
    tracemalloc.start()
    try:
        with pytest.raises(NotUnpacked, match="more than"):
            unpack(codec, packed, max_bytes=MIB)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Small pieces may have to be copied once more; half a gigabyte is not among them.
    assert peak_bytes < 6 * MIB + 2 * len(packed)


@CODECS
@pytest.mark.parametrize("wrong", ["cut", "another", "nothing", "a byte more"])
def test_broken_contents_are_refused_with_the_codec_named(codec: int, wrong: str) -> None:
    good = PACK[codec](b"contents" * 100)
    broken = {"cut": good[:-5], "another": b"junk" * 9, "nothing": b"", "a byte more": good + b"x"}[wrong]
    if (codec, wrong) == (GZIP, "a byte more"):  # as the broker reads it
        assert unpack(codec, broken, max_bytes=MIB) == b"contents" * 100
        return
    with pytest.raises(NotUnpacked, match=f"its {NAMES[codec]} contents are broken: ."):
        unpack(codec, broken, max_bytes=MIB)


def test_pieces_one_after_another_are_one_content() -> None:
    for codec in (GZIP, LZ4, ZSTD):
        assert unpack(codec, PACK[codec](b"one ") + PACK[codec](b"two"), max_bytes=MIB) == b"one two"
    framed = PACK[SNAPPY](b"one ") + PACK[SNAPPY](b"two")[16:]
    assert unpack(SNAPPY, framed, max_bytes=MIB) == b"one two"
    assert unpack(SNAPPY, snappy_raw(b"one"), max_bytes=MIB) == b"one"


def test_pieces_without_number_are_refused() -> None:
    """Each costs a copy of all that follow: a batch of empty ones would take hours."""
    with pytest.raises(NotUnpacked, match="more than 64 gzip members"):
        unpack(GZIP, PACK[GZIP](b"") * 400_000, max_bytes=MIB)


def test_a_snappy_block_that_claims_to_be_large_is_not_believed() -> None:
    claim = b"\xff\xff\xff\xff\x0f" + b"\0" * 100
    assert cramjam.snappy.decompress_raw_len(claim) == 2**32 - 1
    with pytest.raises(NotUnpacked, match="more than"):
        unpack(SNAPPY, claim, max_bytes=MIB)


@pytest.mark.parametrize("codec", [0, 5, 6, 7])
def test_an_unknown_codec_is_named(codec: int) -> None:
    with pytest.raises(NotUnpacked, match=f"its codec is {codec}, and only gzip"):
        unpack(codec, b"contents", max_bytes=MIB)
