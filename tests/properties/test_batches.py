"""Whatever a batch's bytes are, reading them ends, raises nothing and stays within the places that the batch has."""

from __future__ import annotations

import struct

from aiokafka import TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.record.util import calc_crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.kafka_codecs import NAMES
from infra.kafka_fetched import Fetched
from tests.raw_batches import PACK, raw_batch, raw_record

PLACE = TopicPartition("inference.usage.v1", 0)
BASE = 1000
_HEAD_BYTES = 61
_CRC_AT, _CHECKED_FROM = 17, 21
# A batch's own words on how many places it has are the broker's to check, and control batches its own to write.
_KEPT = {*range(_CHECKED_FROM), 21, 22, 23, 24, 25, 26}

headers = st.lists(st.tuples(st.binary(max_size=4), st.none() | st.binary(max_size=3)), max_size=3)
records = st.lists(st.tuples(st.integers(-3, 5), st.none() | st.binary(max_size=9), headers), min_size=1, max_size=5)


@st.composite
def batches(draw: st.DrawFn) -> tuple[bytes, int]:
    """A batch with a right checksum and anything else wrong, and the number of its places."""
    drawn = draw(records)
    contents = b"".join(raw_record(at, value, headers=named) for at, value, named in drawn)
    codec = draw(st.sampled_from([0, *NAMES]))
    places = len(drawn) + draw(st.integers(0, 2))
    contents = hurt(draw, contents, set())
    batch = raw_batch(b"", len(drawn), base=BASE, codec=codec, last=places - 1, packed=PACK[codec](contents))
    batch = hurt(draw, batch, _KEPT)
    checked = batch[_CHECKED_FROM:]
    sized = batch[:8] + struct.pack(">i", len(batch) - 12) + batch[12:_CRC_AT]
    return sized + struct.pack(">I", calc_crc32c(checked)) + checked, places


def hurt(draw: st.DrawFn, data: bytes, kept: set[int]) -> bytes:
    """Some bytes replaced, and the end cut off or made longer, behind what is kept."""
    changed = bytearray(data)
    for at, byte in draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3)):
        if at < len(changed) and at not in kept:
            changed[at] = byte
    end = draw(st.sampled_from([0, 0, 0, 1, 5]))
    return bytes(changed[: max(_HEAD_BYTES if kept else 0, len(changed) - end)]) + draw(st.binary(max_size=2))


@settings(max_examples=400, deadline=None)
@given(batches())
def test_reading_stays_within_the_batch(drawn: tuple[bytes, int]) -> None:
    batch, places = drawn
    after = raw_batch(raw_record(0, b"after"), 1, base=BASE + places)
    found = fetcher.PartitionRecords(
        PLACE, Fetched(batch + after), None, BASE, None, None, True, fetcher.READ_COMMITTED
    )
    offsets = [record.offset for record in found]
    assert offsets == sorted(set(offsets))
    assert set(offsets) <= {*range(BASE, BASE + places + 1)}
    assert len(offsets) > 1, "something stands for it"
    assert offsets[-1] == BASE + places, "what follows is read"
    assert found.next_fetch_offset == BASE + places + 1
