"""What a fetch brings of a partition, batch by batch, for every consumer of a process, Faust's included.

A broker takes batches that aiokafka (0.14.0) cannot read; it raises where it meets one, after every restart alike, and
a megabyte of packed batches may be gigabytes to it. Here a fetch ends once its batches have come to a bound, and one
with a wrong checksum is asked for again before it is believed to be damaged.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import Any, Final

from aiokafka import TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from infra.kafka_batches import HEAD, Batch, Head

#: The batches after those that came to this much are fetched anew, when these were taken.
FETCHED_MAX_BYTES: Final = 16 * 1024 * 1024

_UP_TO_LENGTH: Final = 12
_CONTROL: Final = 0x20
_FORMAT: Final = 2
_REMEMBERED: Final = 256

#: Batches that came with a wrong checksum. The second time it was not the way here: the broker's copy is damaged.
_seen_damaged: OrderedDict[tuple[int, int], None] = OrderedDict()


class Fetched:
    """The batches of one partition; in the place of aiokafka's MemoryRecords."""

    __slots__ = ("_again", "_at", "_data", "_last", "_next", "_size_bytes")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._next: Any = None
        self._last: Batch | None = None
        self._size_bytes = 0
        self._again = False

    def size_in_bytes(self) -> int:
        """Bytes that came; 0 when they are of no use and the fetcher is to ask again."""
        return 0 if self._again else len(self._data)

    def has_next(self) -> bool:
        """Whether there is another batch to read now."""
        if self._next is None:
            self._next = self._read()
        return self._next is not None

    def next_batch(self) -> Any:
        """That batch; None when there is none."""
        found, self._next = self._next, None
        return found if found is not None else self._read()

    def _read(self) -> Any:
        if self._last is not None:
            self._size_bytes += self._last.size_bytes
            self._last = None
            if self._size_bytes > FETCHED_MAX_BYTES:
                return None
        data, at = self._data, self._at
        if len(data) - at < _UP_TO_LENGTH:
            return None
        whole = len(data) - at >= HEAD.size
        head = Head._make(HEAD.unpack_from(data, at) if whole else HEAD.unpack(data[at:].ljust(HEAD.size, b"\0")))
        base, size, format_, attributes, *_ = head
        end = at + _UP_TO_LENGTH + size
        if not at + _UP_TO_LENGTH < end <= len(data):
            return None  # cut by the end of the fetch
        self._at = end
        batch = memoryview(data)[at:end]
        if format_ != _FORMAT or end - at < HEAD.size:
            # Older formats are last known to Kafka 3; of theirs and of later ones the length and the offset are sure.
            alone = head._replace(attributes=0, last=0, records=1, max_ms=0, producer_id=-1)
            self._last = Batch(batch, alone, f"its format is {format_}, and {_FORMAT} is the one that is read")
            return self._last
        reader = DefaultRecordBatch(batch)
        if reader.validate_crc():
            if attributes & _CONTROL:
                return reader  # the broker's own
            self._last = Batch(batch, head, reader)
        elif _seen_before(base, batch):
            self._last = Batch(batch, head, "the checksum is wrong: the broker's copy is damaged")
        else:
            self._at, self._again = len(data), True
        return self._last


def _seen_before(base: int, batch: memoryview) -> bool:
    sight = base, zlib.crc32(batch)
    if sight in _seen_damaged:
        return True
    _seen_damaged[sight] = None
    while len(_seen_damaged) > _REMEMBERED:
        _seen_damaged.popitem(last=False)
    return False


def read_every_batch() -> None:
    """Have all consumers of this process read like this; before the first is started. Twice is once.

    aiokafka has no setting for it: its fetcher names the class in the middle of a long method. So the name is replaced,
    and a release that uses it otherwise is refused: RuntimeError.
    """
    if getattr(fetcher, "MemoryRecords", None) is Fetched:
        return
    try:
        fits = "MemoryRecords" in fetcher.Fetcher._proc_fetch_request.__code__.co_names and _reads_alike()
    except (AttributeError, TypeError):
        fits = False
    if not fits:
        raise RuntimeError("this aiokafka reads batches in another way: infra/kafka_fetched.py must be looked at")
    fetcher.MemoryRecords = Fetched


def _reads_alike() -> bool:
    """Whether aiokafka's fetcher makes the same of a batch by its own class and by this one."""
    builder = DefaultRecordBatchBuilder(_FORMAT, 0, 0, -1, -1, -1, 1024)
    for offset in range(2):
        builder.append(offset, 1, b"key", b"value", [("name", b"content")])
    data, place = bytes(builder.build()), TopicPartition("topic", 0)
    own, ours = (
        list(fetcher.PartitionRecords(place, made(data), None, 1, None, None, True, fetcher.READ_COMMITTED))
        for made in (fetcher.MemoryRecords, Fetched)
    )
    return [record.offset for record in own] == [1] and own == ours
