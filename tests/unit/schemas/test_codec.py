from __future__ import annotations

import struct

import fastavro
import pytest

from schemas.codec import DecodeError, EncodeError, decode, encode
from schemas.ids import dead_letter_id
from schemas.lockfile import locked_schemas
from schemas.records import DeadLetter, InferenceFinished, InferenceRequested, UsageRecorded
from tests.factories import NOON, finished, requested, usage


def dead_letter() -> DeadLetter:
    return DeadLetter(
        event_id=dead_letter_id("t", 0, 7),
        occurred_at=NOON,
        topic="t",
        partition=0,
        offset=7,
        value=b"\x01",
        reason="why",
        attempts=1,
    )


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (requested(), InferenceRequested),
        (finished(), InferenceFinished),
        (usage(), UsageRecorded),
        (dead_letter(), DeadLetter),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_record_comes_back_equal(record, kind) -> None:
    assert decode(encode(record), kind) == record


def test_the_frame_is_a_zero_byte_and_the_locked_id() -> None:
    ids = {s.record: s.id for s in locked_schemas()}
    assert encode(usage())[:5] == b"\x00" + struct.pack(">I", ids[UsageRecorded.SCHEMA])


def test_a_reader_that_knows_only_the_lock_file_and_fastavro_reads_it() -> None:
    record = usage()
    value = encode(record)
    schema = {s.id: s for s in locked_schemas()}[struct.unpack(">I", value[1:5])[0]].definition()
    import io

    datum = fastavro.schemaless_reader(io.BytesIO(value[5:]), fastavro.parse_schema(schema), None)
    assert datum["request_id"] == record.request_id
    assert datum["quantities"] == record.quantities
    assert datum["occurred_at"] == record.occurred_at


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "without a value"),
        (b"", "found nothing"),
        (b"\x00\x00", "framed by"),
        (b"\x01" + encode(usage())[1:], "framed by"),
        (b"\x00\x00\x00\x27\x0f" + encode(usage())[5:], "schema id 9999 is unknown"),
        (encode(finished()), "expected inferlog.usage.v1.UsageRecorded, found"),
        (encode(usage())[:-3], "UsageRecorded"),
        (encode(usage()) + b"x", "1 bytes follow"),
    ],
    ids=["none", "empty", "short", "magic", "id", "other record", "cut off", "trailing"],
)
def test_anything_else_is_a_decode_error_that_says_what_was_found(value, words) -> None:
    with pytest.raises(DecodeError, match=words):
        decode(value, UsageRecorded)


def test_a_value_that_does_not_fit_is_refused_when_encoding() -> None:
    with pytest.raises(EncodeError, match="UsageRecorded"):
        encode(usage(quantities={"items": 2**63}))
    with pytest.raises(EncodeError, match="UsageRecorded"):
        encode(usage(quantities={"items": "two"}))
