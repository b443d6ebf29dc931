"""A batch's records read one by one where aiokafka gives up on all of them, and what stands for the unreadable.

Every record says its own length, and every length is checked before it is believed. Names of headers need not be text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from schemas.frame import Unreadable

#: Of more headers only the first are kept: two bytes on the log are a tuple of 64 in memory.
MAX_HEADERS: Final = 1000

_VARINT_BYTES: Final = 10


class BrokenRecord(ValueError):
    """These bytes are no record; the message says where they stop to be one."""


@dataclass(frozen=True, slots=True)
class Record:
    """What aiokafka's consumer asks of a record."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    checksum: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a batch says of its records' timestamps; `appended` is the broker's own time, None where writers stamp."""

    first: int
    appended: int | None


def stand_in(offset: int, reason: str, *, timestamp_ms: int) -> Record:
    """A record for a place on the log at which nothing can be read, as no decoder takes it."""
    return Record(offset, timestamp_ms, 0, None, Unreadable(reason.encode()))


def read_records(data: bytes | memoryview, count: int, *, base: int, times: Times, skip: int = 0) -> Iterator[Record]:
    """The records after the first `skip` of `count` in these unpacked bytes of format 2, each at the offset it says.

    Raises BrokenRecord at the first that is none.
    """
    reader = _Reader(data)
    for number in range(count):
        length = reader.number()
        end = reader.at + length
        if not 0 <= length <= len(data) - reader.at:
            raise BrokenRecord(f"record {number + 1} says that it has {length} bytes, {len(data) - reader.at} are left")
        if number >= skip:
            try:
                record = _record(reader, base, times)
            except BrokenRecord as error:
                raise BrokenRecord(f"record {number + 1}: {error}") from error
            if reader.at > end:
                raise BrokenRecord(f"record {number + 1} is longer than the {length} bytes it says")
            yield record
        reader.at = end


def most_headers(data: bytes | memoryview, count: int) -> int:
    """The largest number of headers that any of these records says it has; those of broken bytes count as none."""
    reader, most = _Reader(data), 0
    try:
        for _ in range(count):
            length = reader.number()
            end = reader.at + max(0, length)
            reader.at += 1
            reader.number()
            reader.number()
            reader.skip()
            reader.skip()
            most = max(most, reader.number())
            reader.at = end
    except BrokenRecord:
        return most
    return most


def _record(reader: _Reader, base: int, times: Times) -> Record:
    reader.at += 1  # attributes: none are in use
    stamped = times.first + reader.number()
    offset = base + reader.number()
    key = reader.content()
    value = reader.content()
    count = reader.number()
    if count < 0:
        raise BrokenRecord(f"it says that it has {count} headers")
    headers = []
    for _ in range(min(count, MAX_HEADERS)):
        name = reader.content()
        if name is None:
            raise BrokenRecord("a header has no name")
        headers.append((name.decode("utf-8", "backslashreplace"), reader.content()))
    by_broker = times.appended is not None
    timestamp = stamped if times.appended is None else times.appended
    return Record(offset, timestamp, int(by_broker), key, value, tuple(headers))


class _Reader:
    """A place in a batch's bytes."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data
        self.at = 0

    def number(self) -> int:
        """The next number, in zigzag coding of 7 bits a byte."""
        found = 0
        for shift in range(0, 7 * _VARINT_BYTES, 7):
            if self.at >= len(self.data):
                raise BrokenRecord("the batch ends within a number")
            byte = self.data[self.at]
            self.at += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                found &= 0xFFFF_FFFF_FFFF_FFFF
                return (found >> 1) ^ -(found & 1)
        raise BrokenRecord(f"a number has more than {_VARINT_BYTES} bytes")

    def content(self) -> bytes | None:
        """The next bytes, which say their length; None when that is negative."""
        at = self.skip()
        return None if at is None else bytes(self.data[at : self.at])

    def skip(self) -> int | None:
        """Pass the next bytes; returns where they began."""
        length = self.number()
        if length < 0:
            return None
        if length > len(self.data) - self.at:
            raise BrokenRecord(f"{length} bytes are said to follow, and the batch has {len(self.data) - self.at}")
        at = self.at
        self.at += length
        return at
