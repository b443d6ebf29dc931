"""Batches as a broker takes them and aiokafka does not, read by aiokafka's own fetcher from what a fetch brought."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.record.memory_records import MemoryRecords

from infra import kafka_batches
from infra.kafka import BusUnavailable, open_consumer
from infra.kafka_batches import RECORD_BYTES, RECORDS_MAX, STAND_INS_MAX, UNPACKED_MAX_BYTES
from infra.kafka_codecs import GZIP, LZ4, NAMES, ZSTD
from infra.kafka_fetched import _REMEMBERED, FETCHED_MAX_BYTES, Fetched, read_every_batch
from infra.kafka_records import MAX_HEADERS
from infra.settings import KafkaSettings
from schemas.codec import DecodeError, decode_at
from schemas.frame import Unreadable
from schemas.records import UsageRecorded
from tests.raw_batches import PACK, old_message, raw_batch, raw_record, varint

PLACE = TopicPartition("inference.usage.v1", 0)
ALL_CODECS = pytest.mark.parametrize("codec", [0, *NAMES], ids=["plain", *NAMES.values()])
MIB = 1024 * 1024
NOT_TEXT = b"\xff\xfename"


def read(data: bytes, at: int = 0, made: type = Fetched) -> tuple[list[ConsumerRecord], int]:
    """The records of this fetch from a position on, and the position after it."""
    found = fetcher.PartitionRecords(PLACE, made(data), None, at, None, None, True, fetcher.READ_COMMITTED)
    return list(found), found.next_fetch_offset


def reads(log: bytes) -> Iterator[list[ConsumerRecord]]:
    """Fetch after fetch from the beginning of a log to its end, as a broker answers them."""
    at = 0
    while True:
        start = 0
        while start < len(log):
            base, size = struct.unpack_from(">qi", log, start)
            (last,) = struct.unpack_from(">i", log, start + 23)
            if base + last >= at:
                break
            start += 12 + size
        else:
            return
        records, reached = read(log[start:], at)
        assert reached > at
        at = reached
        yield records


def three(base: int, **batch: int) -> bytes:
    return raw_batch(b"".join(raw_record(n, b"good %d" % (base + n)) for n in range(3)), 3, base=base, **batch)


def among_good(bad: bytes, places: int) -> list[ConsumerRecord]:
    """What is read at the places of a batch that lies between good ones, which are read too."""
    middle = struct.pack(">q", 3) + bad[8:]
    records, reached = read(three(0) + middle + three(3 + places))
    assert reached == places + 6
    assert [r.value for r in records if r.offset < 3] == [b"good 0", b"good 1", b"good 2"]
    assert [r.offset for r in records[-3:]] == [places + 3, places + 4, places + 5]
    assert [r.value for r in records[-3:]] == [b"good %d" % (places + n) for n in (3, 4, 5)]
    return records[3:-3]


def refused(records: list[ConsumerRecord]) -> str:
    """The one reason that decoders give for these."""
    reasons = set()
    for record in records:
        assert isinstance(record.value, Unreadable)
        assert record.key is None and record.headers == ()
        with pytest.raises(DecodeError) as error:
            decode_at(record, UsageRecorded)
        reasons.add(error.value.reason)
    (reason,) = reasons
    return reason


@ALL_CODECS
@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 300])
def test_good_batches_are_read_as_aiokafka_reads_them(codec: int, count: int) -> None:
    headers = [(b"name", b"content"), ("naïve".encode(), None)]
    records = b"".join(raw_record(n, b"v%d" % n, headers=headers, key=None) for n in range(count))
    data = raw_batch(records, count, codec=codec) + three(count) + three(count + 3, attributes=0x08)[:-1]
    assert read(data) == read(data, made=MemoryRecords)
    assert len(read(data)[0]) == count + 3
    assert read(data, at=1) == read(data, 1, MemoryRecords)


@ALL_CODECS
@pytest.mark.parametrize("count", [1, 128, 300])
def test_good_batches_cost_no_reading_in_python(codec: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kafka_batches, "read_records")
    data = raw_batch(b"".join(raw_record(n, b"v") for n in range(count)), count, codec=codec)
    assert len(read(data)[0]) == count


@ALL_CODECS
def test_a_header_whose_name_is_no_text_holds_nothing_up(codec: int) -> None:
    wrong = raw_record(1, b"v1", headers=[(b"name", b"x"), (NOT_TEXT, b"y"), (b"\x80", None)])
    found = among_good(raw_batch(raw_record(0, b"v0") + wrong + raw_record(2, b"v2"), 3, codec=codec), 3)
    assert [r.value for r in found] == [b"v0", b"v1", b"v2"]
    assert found[1].headers == (("name", b"x"), ("\\xff\\xfename", b"y"), ("\\x80", None))
    assert [r.timestamp for r in found] == [found[0].timestamp] * 3


def test_times_and_places_are_the_same_however_a_batch_is_read() -> None:
    for attributes in (0, 0x08):
        good, bad = (
            raw_batch(raw_record(0, b"a") + raw_record(1, b"b", headers=[(name, b"")]), 2, attributes=attributes)
            for name in (b"name", NOT_TEXT)
        )
        one_by_one = [(r.offset, r.timestamp, r.timestamp_type, r.key, r.value) for r in read(bad)[0]]
        assert one_by_one == [(r.offset, r.timestamp, r.timestamp_type, r.key, r.value) for r in read(good)[0]]


@pytest.mark.parametrize("said", [(0, 0, 0), (0, 2**31 - 1, 2), (2, 1, 0), (-7, 1, 2), (0, 3, 4), (1, 2, 3)])
@pytest.mark.parametrize("name", [b"name", NOT_TEXT])
def test_the_place_of_a_record_is_the_brokers_word_not_its_own(said: tuple[int, ...], name: bytes) -> None:
    """The broker checks how many records and places there are, and not what the records of a plain batch say."""
    records = b"".join(raw_record(at, b"v%d" % n, headers=[(name, b"")]) for n, at in enumerate(said))
    found = among_good(raw_batch(records, 3), 3)
    assert [(r.offset, r.value) for r in found] == [(3, b"v0"), (4, b"v1"), (5, b"v2")]


@pytest.mark.parametrize("name", [b"name", NOT_TEXT])
def test_what_compaction_left_stays_where_it_is(name: bytes) -> None:
    left = [(1, b"a"), (4, b"b"), (5, b"c")]
    records = b"".join(raw_record(at, value, headers=[(name, b"")]) for at, value in left)
    assert [(r.offset - 3, r.value) for r in among_good(raw_batch(records, 3, last=7), 8)] == left
    assert among_good(raw_batch(b"", 0, last=7), 8) == []


@pytest.mark.parametrize("codec", NAMES, ids=NAMES.get)
def test_a_batch_that_is_larger_unpacked_than_any_is_not_unpacked(codec: int) -> None:
    head = raw_record(0, b"v0") + raw_record(1, b"v1")
    bomb = raw_batch(head, 2, codec=codec, packed=PACK[codec](head + bytes(UNPACKED_MAX_BYTES)))
    tracemalloc.start()
    try:
        found = among_good(bomb, 2)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * UNPACKED_MAX_BYTES
    assert refused(found) == (
        f"cannot be read from the log: of the batch at offsets 3 to 4 (2 records in {len(bomb)} bytes, {NAMES[codec]}) "
        f"it holds more than {UNPACKED_MAX_BYTES} bytes unpacked"
    )


def test_the_largest_batch_that_a_topic_takes_may_be_packed() -> None:
    value = bytes(8 * MIB)
    assert [r.value for r in among_good(raw_batch(raw_record(0, value), 1, codec=ZSTD), 1)] == [value]


def test_packed_batches_that_add_up_end_the_fetch_and_all_are_read() -> None:
    size = 5 * MIB
    packed = PACK[ZSTD](raw_record(0, bytes(size)))
    log = b"".join(raw_batch(b"", 1, base=n, codec=ZSTD, packed=packed) for n in range(20)) + three(20)
    seen: list[int] = []
    for records in reads(log):
        seen += [r.offset for r in records]
        held = sum(len(r.value or b"") for r in records)
        assert held <= FETCHED_MAX_BYTES + size
    assert seen == list(range(23))


@pytest.mark.parametrize("per_batch", [100, 50_000])
def test_many_small_records_end_the_fetch_too(per_batch: int) -> None:
    batches = 150_000 // per_batch
    one = b"".join(raw_record(n, None, key=None) for n in range(per_batch))
    log = b"".join(raw_batch(one, per_batch, base=n * per_batch) for n in range(batches))
    found = [len(records) for records in reads(log)]
    assert sum(found) == batches * per_batch
    assert max(found) * RECORD_BYTES <= FETCHED_MAX_BYTES + per_batch * RECORD_BYTES
    assert len(found) > 1


BROKEN = {
    "an unknown codec": (raw_batch(three(0)[61:], 3, says_codec=6), "its codec is 6, and only gzip"),
    "contents cut": (raw_batch(b"", 3, codec=GZIP, packed=PACK[GZIP](b"x" * 99)[:-9]), "gzip contents are broken"),
    "contents of another codec": (raw_batch(b"", 3, codec=LZ4, packed=PACK[ZSTD](b"x")), "its lz4 contents are broken"),
    "bytes after the contents": (raw_batch(b"", 3, codec=LZ4, packed=PACK[LZ4](three(0)[61:]) + b"j"), "lz4 contents"),
    "more records than places": (raw_batch(three(0)[61:], 4, last=2), "4 records cannot have 3 places"),
    "fewer than none": (raw_batch(three(0)[61:], -1, last=2), "-1 records cannot have 3 places"),
    "none": (raw_batch(three(0)[61:], 0, last=2), "0 records cannot have 3 places"),
}


@pytest.mark.parametrize(("bad", "why"), BROKEN.values(), ids=BROKEN)
def test_a_broken_batch_is_as_many_refused_records_as_it_has_places(bad: bytes, why: str) -> None:
    found = among_good(bad, 3)
    assert why in refused(found)
    places = [r.offset for r in found]
    one_for_all = "this stands for all of it from 3 on" in refused(found)
    assert places == ([3] if one_for_all else [3, 4, 5])
    # As many records as places: each has its letter. Otherwise which places there are is not known.
    assert one_for_all == ("cannot have" in why)


NO_RECORD = {
    "ends early": (b"", "the batch ends within a number"),
    "says more than there is": (raw_record(1, b"v", length=1000), "record 2 says that it has 1000 bytes"),
    "says less than none": (raw_record(1, b"v", length=-3), "record 2 says that it has -3 bytes"),
    "says less than it is": (raw_record(1, b"value", length=4) + raw_record(2, b"v2"), "record 2"),
    "a key past the end": (varint(9) + b"\0\0\2" + varint(2**40) + b"12345", "record 2: 1099511627776 bytes are said"),
    "a key past all numbers": (varint(16) + b"\0\0\2" + varint(2**63 - 9) + b"123", "record 2"),
    "a number without end": (varint(20) + b"\0" + b"\xff" * 19, "record 2: a number has more than 10 bytes"),
    "fewer headers than none": (varint(6) + b"\0\0\2\1\1" + varint(-3), "record 2: it says that it has -3 headers"),
    "a header without a name": (varint(7) + b"\0\0\2\1\1" + varint(1) + varint(-1), "record 2: a header has no name"),
    "headers past the end": (varint(6) + b"\0\0\2\1\1" + varint(2**50), "record 2: the batch ends within a number"),
}


@ALL_CODECS
@pytest.mark.parametrize(("bad", "why"), NO_RECORD.values(), ids=NO_RECORD)
def test_what_can_be_read_before_a_broken_record_is(bad: bytes, why: str, codec: int) -> None:
    batch = raw_batch(raw_record(0, b"v0") + bad, 3, codec=codec)
    found = among_good(batch, 3)
    assert (found[0].offset, found[0].value) == (3, b"v0")
    assert why in refused(found[1:])
    assert [r.offset for r in found[1:]] == [4, 5]


def test_many_places_have_one_stand_in_that_says_so() -> None:
    places = STAND_INS_MAX + 1
    bad = raw_batch(b"", places, codec=GZIP, packed=b"junk")
    found = among_good(bad, places)
    assert [r.offset for r in found] == [3]
    assert "this stands for all of it from 3 on" in refused(found)
    assert f"at offsets 3 to {places + 2}" in refused(found)
    # A reader that stopped after it goes on behind the batch, also from a position within it.
    moved = struct.pack(">q", 3) + bad[8:]
    assert read(moved, 4) == ([], places + 3)


def test_more_records_than_a_batch_can_honestly_have_are_not_read() -> None:
    count = RECORDS_MAX + 1
    found = among_good(raw_batch(raw_record(0, None, key=None) * count, count, codec=ZSTD), count)
    assert f"more than {RECORDS_MAX} records" in refused(found)
    honest = raw_batch(b"".join(raw_record(n, None, key=None) for n in range(RECORDS_MAX)), RECORDS_MAX, codec=ZSTD)
    assert [r.offset for r in read(honest)[0]] == list(range(RECORDS_MAX))


@pytest.mark.parametrize("codec", [0, ZSTD])
def test_headers_without_number_are_cut_and_the_value_counts(codec: int) -> None:
    """Two bytes on the log would be a tuple of 64 in memory."""
    flood = raw_record(0, b"value", headers=[(b"", b"")] * 600_000)
    batch = raw_batch(flood + raw_record(1, b"next"), 2, codec=codec)
    tracemalloc.start()
    try:
        found = among_good(batch, 2)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [r.value for r in found] == [b"value", b"next"]
    assert len(found[0].headers) == MAX_HEADERS
    assert peak_bytes < 10 * MIB


def test_formats_that_nothing_writes_any_more_are_not_unpacked() -> None:
    nested = PACK[GZIP](old_message(1, b"x") * 1000)
    for format_ in (0, 1):
        for bad in (old_message(format_, b"value"), old_message(format_, nested, attributes=GZIP)):
            assert f"its format is {format_}, and 2 is the one that is read" in refused(among_good(bad, 1))
    assert "its format is 3" in refused(among_good(raw_batch(raw_record(0, b"v"), 1, magic=3), 1))


def test_a_wrong_checksum_is_asked_for_again_before_it_is_believed() -> None:
    good = three(0)
    hurt = bytearray(three(3))
    hurt[70] ^= 1
    data = good + bytes(hurt) + three(6)
    records, reached = read(data)
    assert ([r.offset for r in records], reached) == ([0, 1, 2], 3)
    # On the way here, then: the next fetch brings it whole.
    assert [r.offset for r in read(three(3) + three(6), 3)[0]] == [3, 4, 5, 6, 7, 8]
    # At the broker, then: it comes again as it was.
    found = among_good(bytes(hurt), 3)
    assert "the checksum is wrong" in refused(found)
    assert [r.offset for r in found] == [3, 4, 5]


def test_no_more_damaged_batches_are_remembered_than_a_bound() -> None:
    """A partition of nothing else, or a network that hurts each batch once, would fill the memory over the days."""
    hurt = []
    for number in range(_REMEMBERED + 1):
        batch = bytearray(raw_batch(raw_record(0, b"damaged %d" % number), 1, base=number))
        batch[-1] ^= 1
        hurt.append(bytes(batch))
    assert not any(Fetched(batch).has_next() for batch in hurt)
    assert Fetched(hurt[-1]).has_next() and Fetched(hurt[1]).has_next(), "within the bound they are"
    assert not Fetched(hurt[0]).has_next(), "the oldest is asked for anew"


def test_a_fetch_that_begins_with_a_wrong_checksum_is_not_taken_for_a_record_too_large() -> None:
    hurt = bytearray(three(0))
    hurt[71] ^= 1
    fetched = Fetched(bytes(hurt))
    assert not fetched.has_next()
    assert fetched.size_in_bytes() == 0
    cut = Fetched(three(0)[:-1])
    assert not cut.has_next()
    assert cut.size_in_bytes() > 0


def test_control_batches_are_aiokafkas_business() -> None:
    abort = raw_record(0, bytes(6), key=struct.pack(">hh", 0, 0))
    marker = raw_batch(abort, 1, attributes=0x30)
    assert read(marker + three(1)) == read(marker + three(1), made=MemoryRecords)


async def test_every_consumer_reads_like_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MemoryRecords", MemoryRecords)
    with pytest.raises(BusUnavailable):
        async with open_consumer(KafkaSettings(bootstrap="127.0.0.1:1", namespace=""), group=None):
            pass
    assert fetcher.MemoryRecords is Fetched


def test_an_aiokafka_that_reads_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Another:
        """A reader that asks batches for something else."""

        def __init__(self, place: object, records: Fetched, *_: object) -> None:
            self.batch = records.next_batch()

        def __iter__(self) -> Iterator[object]:
            return iter(self.batch.records())

    for name, other in (("PartitionRecords", Another), ("Fetcher", Another)):
        with monkeypatch.context() as patch:
            patch.setattr(fetcher, "MemoryRecords", MemoryRecords)
            patch.setattr(fetcher, name, other)
            with pytest.raises(RuntimeError, match="reads batches in another way"):
                read_every_batch()
            assert fetcher.MemoryRecords is MemoryRecords
