"""A record batch's contents, unpacked up to a bound: what a few kilobytes say can be gigabytes.

Each codec is stopped at the bound, not judged after it, so nothing larger is ever held.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Final

import cramjam

GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4
NAMES: Final = {GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}

_GZIP_MEMBER: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 31  # zlib's word for a gzip header and the largest window
#: A batch is one; each costs a copy of all that follow it.
_GZIP_MEMBERS: Final = 64
#: What Java's snappy writes before its blocks; a size and that many bytes each follow.
_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES: Final = 16
_SIZE: Final = struct.Struct(">i")
#: Room that is tried first, in multiples of the packed size; most contents fit.
_FIRST_ROOM: Final = 8
_SMALLEST_ROOM: Final = 64 * 1024


class NotUnpacked(ValueError):
    """The contents cannot be unpacked; the message says why."""


def unpack(codec: int, data: bytes, *, max_bytes: int) -> bytes | memoryview:
    """What these bytes unpack to. Raises NotUnpacked: more than `max_bytes`, an unknown codec, broken contents."""
    if codec not in NAMES:
        raise NotUnpacked(f"its codec is {codec}, and only {', '.join(f'{n} ({c})' for c, n in NAMES.items())} exist")
    try:
        return _UNPACK[codec](data, max_bytes)
    except (cramjam.DecompressionError, zlib.error, struct.error) as error:
        raise NotUnpacked(f"its {NAMES[codec]} contents are broken: {error}") from error


def _too_large(max_bytes: int) -> NotUnpacked:
    return NotUnpacked(f"it holds more than {max_bytes} bytes unpacked")


def _gzip(data: bytes, max_bytes: int) -> bytes:
    """All members one after another; what follows the last is left out, as the broker does."""
    found: list[bytes] = []
    left = max_bytes
    while not found or data.startswith(_GZIP_MEMBER):
        if len(found) == _GZIP_MEMBERS:
            raise NotUnpacked(f"it is more than {_GZIP_MEMBERS} gzip members")
        member = zlib.decompressobj(_GZIP_WINDOW)
        found.append(member.decompress(data, left + 1))  # 0 would mean without a bound
        left -= len(found[-1])
        if left < 0:
            raise _too_large(max_bytes)
        if not member.eof:
            raise NotUnpacked("its gzip contents are broken: they end too early")
        data = member.unused_data
    return b"".join(found)


def _snappy(data: bytes, max_bytes: int) -> bytes:
    """One block, or many as Java's library frames them. Every block says how large it is before it is unpacked."""
    if not data.startswith(_XERIAL) or len(data) <= _XERIAL_HEADER_BYTES:
        blocks = [data]
    else:
        blocks, at = [], _XERIAL_HEADER_BYTES
        while at < len(data):
            (size,) = _SIZE.unpack_from(data, at)
            at += _SIZE.size
            if not 0 <= size <= len(data) - at:
                raise NotUnpacked(f"its snappy contents are broken: a block of {size} bytes in {len(data) - at}")
            blocks.append(data[at : at + size])
            at += size
    found: list[bytes] = []
    left = max_bytes
    for block in blocks:
        left -= cramjam.snappy.decompress_raw_len(block)
        if left < 0:
            raise _too_large(max_bytes)
        found.append(bytes(cramjam.snappy.decompress_raw(block)))
    return b"".join(found)


def _into(decompress_into: Callable[[bytes, bytearray], int]) -> Callable[[bytes, int], memoryview]:
    """A codec that tells only by failing that its contents are larger than the room it was given."""

    def decompress(data: bytes, max_bytes: int) -> memoryview:
        room = min(max_bytes, max(_FIRST_ROOM * len(data), _SMALLEST_ROOM))
        while True:
            out = bytearray(room)
            try:
                return memoryview(out)[: decompress_into(data, out)]
            except cramjam.DecompressionError as error:
                if "whole buffer" not in str(error):
                    raise
            if room >= max_bytes:
                raise _too_large(max_bytes)
            room = min(max_bytes, _FIRST_ROOM * room)

    return decompress


_UNPACK: Final[dict[int, Callable[[bytes, int], bytes | memoryview]]] = {
    GZIP: _gzip,
    SNAPPY: _snappy,
    LZ4: _into(cramjam.lz4.decompress_into),
    ZSTD: _into(cramjam.zstd.decompress_into),
}
