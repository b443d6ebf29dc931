from __future__ import annotations

import struct
from datetime import datetime, timezone

from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import DecodeError, decode, encode
from schemas.records import (
    BucketCharge,
    DeadLetter,
    InferenceFinished,
    InferenceRequested,
    Outcome,
    Task,
    UsageRecorded,
)
from schemas.tensors import Tensor, bytes_tensor

texts = st.text(st.characters(codec="utf-8"), max_size=40)
longs = st.integers(0, 2**63 - 1)
ints = st.integers(0, 2**31 - 1)
times = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(timezone.utc))  # noqa: DTZ001
tensors = st.one_of(
    st.builds(
        lambda name, values: Tensor(
            name=name, datatype="FP32", shape=(len(values),), data=struct.pack(f"<{len(values)}f", *values)
        ),
        texts,
        st.lists(st.floats(width=32), max_size=8),
    ),
    st.builds(bytes_tensor, texts, st.lists(st.binary(max_size=20), max_size=5)),
)
charges = st.builds(BucketCharge, bucket=texts, interval_us=longs, burst=longs, cost=longs, remaining=longs)
quantities = st.dictionaries(texts, longs, max_size=4)

records = st.one_of(
    st.builds(
        InferenceRequested,
        event_id=st.uuids(),
        occurred_at=times,
        request_id=st.uuids(),
        customer_id=texts,
        key_id=texts,
        model=texts,
        version=texts,
        artifact_uri=texts,
        price_id=texts,
        task=st.sampled_from(Task),
        inputs=st.lists(tensors, max_size=3).map(tuple),
        item_count=ints,
        deadline_at=times,
        reply_to=texts,
        traceparent=st.none() | texts,
        limiter_time=times,
        limiter_buckets=st.lists(charges, max_size=3).map(tuple),
    ),
    st.builds(
        InferenceFinished,
        event_id=st.uuids(),
        occurred_at=times,
        request_id=st.uuids(),
        customer_id=texts,
        model=texts,
        version=texts,
        outcome=st.sampled_from(Outcome),
        error_code=st.none() | texts,
        error_message=st.none() | texts,
        outputs=st.lists(tensors, max_size=3).map(tuple),
        price_id=texts,
        quantities=quantities,
        admitted_at=times,
        worker=texts,
        batch_id=st.uuids(),
        batch_items=ints,
        queue_us=longs,
        run_us=longs,
    ),
    st.builds(
        UsageRecorded,
        event_id=st.uuids(),
        occurred_at=times,
        request_id=st.uuids(),
        customer_id=texts,
        model=texts,
        version=texts,
        price_id=texts,
        quantities=quantities,
    ),
    st.builds(
        DeadLetter,
        event_id=st.uuids(),
        occurred_at=times,
        topic=texts,
        partition=ints,
        offset=longs,
        key=st.none() | st.binary(max_size=20),
        value=st.none() | st.binary(max_size=50),
        reason=texts,
        attempts=ints,
    ),
)


@given(records)
def test_every_record_comes_back_equal(record) -> None:
    assert decode(encode(record), type(record)) == record


@given(st.binary(max_size=200), st.sampled_from([InferenceRequested, InferenceFinished, UsageRecorded, DeadLetter]))
def test_arbitrary_bytes_are_a_record_or_a_decode_error(value, kind) -> None:
    for attempt in (value, b"\x00\x00\x00\x00" + value, *(bytes([0, 0, 0, 0, n]) + value for n in range(1, 5))):
        try:
            decode(attempt, kind)
        except DecodeError:
            continue


@given(records, st.data())
def test_a_damaged_record_is_a_record_or_a_decode_error(record, data) -> None:
    value = bytearray(encode(record))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(value)))
    for attempt in (bytes(value), bytes(value[:cut])):
        try:
            decode(attempt, type(record))
        except DecodeError:
            continue
