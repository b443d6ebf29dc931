"""The records of one batch, whatever its writer made of it: each place of the log that it has is read, or stood in for.

A good batch goes through aiokafka's own reader. What that gives up on is read record by record, and where nothing can
be read a record stands that no decoder takes, with the reason (docs/decisions/0013-batches-that-cannot-be-read.md).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from itertools import chain, islice
from operator import attrgetter, eq
from typing import Any, Final, NamedTuple

from aiokafka.record.default_records import DefaultRecordBatch

from infra.kafka_codecs import NAMES, NotUnpacked, unpack
from infra.kafka_records import MAX_HEADERS, BrokenRecord, Record, Times, most_headers, read_records, stand_in

log = logging.getLogger(__name__)

#: What a batch may hold unpacked: twice the largest that a topic takes as it is (`schemas.topics`), and no writer of
#: ours packs. One that is not packed may be as large as its topic lets it.
UNPACKED_MAX_BYTES: Final = 16 * 1024 * 1024
#: As many of the shortest usage records as fill the largest batch of a topic.
RECORDS_MAX: Final = 100_000
#: Counted for a record in memory besides its bytes.
RECORD_BYTES: Final = 256
#: An unreadable batch with more places than this has one stand-in for all of them.
STAND_INS_MAX: Final = 1000

_CODEC, _APPENDED, _TRANSACTIONAL = 0x07, 0x08, 0x10
_CODEC_AT: Final = 22
_CHUNK: Final = 128
_OFFSET: Final = attrgetter("offset")
#: Smaller batches cannot hold enough headers to matter.
_SMALL_BYTES: Final = 1024 * 1024


class Head(NamedTuple):
    """What the first HEAD.size bytes of a batch of format 2 say; times are Unix milliseconds."""

    base: int
    follow_bytes: int  # how many follow this number
    magic: int
    attributes: int
    last: int
    first_ms: int
    max_ms: int
    producer_id: int
    records: int


HEAD: Final = struct.Struct(">qi4xb4xhiqqq6xi")


class Batch:
    """One batch, as aiokafka's fetcher asks for it. `reader` is aiokafka's own, or why there is none.

    `size_bytes` is about what its records take in memory; of packed ones it is known when they are read.
    """

    __slots__ = (
        "_data",
        "_head",
        "_reader",
        "base_offset",
        "is_transactional",
        "next_offset",
        "producer_id",
        "size_bytes",
    )

    is_control_batch = False

    def __init__(self, data: memoryview, head: Head, reader: DefaultRecordBatch | str) -> None:
        self.base_offset, _, _, attributes, last, _, _, self.producer_id, records = head
        self._data = data
        self._head = head
        self._reader = reader
        self.next_offset: int = self.base_offset + (last + 1 if last > 0 else 1)
        self.is_transactional = attributes & _TRANSACTIONAL != 0
        self.size_bytes = len(data) + RECORD_BYTES * records

    def validate_crc(self) -> bool:
        """It was, when this object was made."""
        return True

    def __iter__(self) -> Iterator[Any]:
        _, _, _, attributes, last, _, _, _, records = self._head
        if (
            0 < records <= _CHUNK
            and records <= last + 1
            and self.size_bytes <= _SMALL_BYTES
            and not attributes & _CODEC
        ):
            try:
                return iter(self._placed(list(self._reader), 0, self.base_offset))
            except Exception as error:  # noqa: BLE001 (whatever it is: the batch is looked at more closely)
                log.debug("aiokafka cannot read a batch", extra={"fields": {"reason": repr(error)}})
        return chain.from_iterable(self._chunks())

    def _chunks(self) -> Iterator[list[Any]]:
        """All records in order, each at a place of its own within the batch."""
        head = self._head
        try:
            reader, contents = self._unpacked()
        except NotUnpacked as error:
            self.size_bytes = 0
            yield from self._stand_ins(self.base_offset, str(error))
            return
        self.size_bytes = len(contents) + RECORD_BYTES * head.records
        done, at = 0, head.base
        if len(contents) <= _SMALL_BYTES or most_headers(contents, head.records) <= MAX_HEADERS:
            records = chain(reader)  # asked for an iterator once; the reader has no second one
            while done < head.records:
                try:
                    # Never past the last one: that reader begins anew behind its end.
                    chunk = list(islice(records, min(_CHUNK, head.records - done)))
                except Exception as error:  # noqa: BLE001 (whatever it is: the rest is read one by one)
                    log.debug("aiokafka cannot read a batch", extra={"fields": {"reason": repr(error)}})
                    break
                chunk = self._placed(chunk, done, at)
                done, at = done + len(chunk), chunk[-1].offset + 1
                yield chunk
        if done < head.records:
            yield from self._one_by_one(contents, done, at)

    def _unpacked(self) -> tuple[Any, memoryview]:
        """aiokafka's reader of the batch, and the bytes of its records. Raises NotUnpacked."""
        head, contents = self._head, self._data[HEAD.size :]
        if isinstance(self._reader, str):
            raise NotUnpacked(self._reader)
        if not 0 <= head.records <= head.last + 1 or (contents and not head.records):
            raise NotUnpacked(f"{head.records} records cannot have {head.last + 1} places")
        if head.records > RECORDS_MAX:
            raise NotUnpacked(f"more than {RECORDS_MAX} records are not taken")
        codec = head.attributes & _CODEC
        if not codec:
            return self._reader, contents
        plain = bytearray(self._data[: HEAD.size])
        plain[_CODEC_AT] &= ~_CODEC
        batch = bytes(plain) + unpack(codec, bytes(contents), max_bytes=UNPACKED_MAX_BYTES)
        return DefaultRecordBatch(batch), memoryview(batch)[HEAD.size :]

    def _one_by_one(self, contents: memoryview, done: int, at: int) -> Iterator[list[Any]]:
        head = self._head
        times = Times(first=head.first_ms, appended=head.max_ms if head.attributes & _APPENDED else None)
        try:
            for record in read_records(contents, head.records, base=head.base, times=times, skip=done):
                placed = self._placed([record], done, at)
                done, at = done + 1, placed[0].offset + 1
                yield placed
        except BrokenRecord as error:
            yield from self._stand_ins(at, str(error))

    def _placed(self, records: list[Any], done: int, at: int) -> list[Any]:
        """These records, of which `done` came before and the next place is `at`, at the offsets that are theirs.

        The broker gives a batch a place for each record, and believes what each says of its own; a consumer that
        believed it too would jump past records of others, or back. Compaction may have taken some away.
        """
        if all(map(eq, map(_OFFSET, records), range(at, at + len(records)))):
            return records
        placed = []
        for number, r in enumerate(records, start=done + 1):
            latest = self.next_offset - 1 - (self._head.records - number)
            if not at <= r.offset <= latest:
                r = Record(at, r.timestamp, r.timestamp_type, r.key, r.value, tuple(r.headers))
            placed.append(r)
            at = r.offset + 1
        return placed

    def _stand_ins(self, at: int, why: str) -> Iterator[list[Any]]:
        """For all places from `at` on; so many that they would be a flood of their own, or not known, have one."""
        head, end = self._head, self.next_offset
        packed = f", {NAMES[codec]}" if (codec := head.attributes & _CODEC) in NAMES else ""
        reason = (
            f"cannot be read from the log: of the batch at offsets {head.base} to {end - 1} "
            f"({head.records} records in {len(self._data)} bytes{packed}) {why}"
        )
        places = range(at, end)
        if len(places) > STAND_INS_MAX or head.records != head.last + 1:
            reason, places = f"{reason}; this stands for all of it from {at} on", range(at, at + 1)
        log.error("records set aside unread", extra={"fields": {"first": at, "end": end, "reason": reason}})
        for place in places:
            yield [stand_in(place, reason, timestamp_ms=head.max_ms)]
