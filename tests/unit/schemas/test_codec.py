from __future__ import annotations

import json
import struct
import sys
from datetime import datetime, timedelta, timezone
from typing import Any

import fastavro
import pytest

from schemas.codec import Codec, DecodeError, EncodeError, UnknownSchema, decode, encode
from schemas.facts import SchemaPublished
from schemas.frame import fingerprint
from schemas.ids import dead_letter_id, schema_id_event
from schemas.lockfile import LockfileError, latest, locked_schemas
from schemas.plain import to_plain
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


NEWER = latest(UsageRecorded.SCHEMA).definition()


def announced(definition: Any, record: str = UsageRecorded.SCHEMA) -> SchemaPublished:
    return SchemaPublished(
        event_id=schema_id_event(900),
        occurred_at=NOON,
        schema_id=900,
        subject=latest(UsageRecorded.SCHEMA).subject,
        version=2,
        record=record,
        fingerprint=fingerprint(definition),
        definition=json.dumps(definition),
    )


def test_a_schema_is_learnt_once() -> None:
    codec = Codec(locked_schemas())
    assert codec.learn(announced(NEWER))
    assert not codec.learn(announced(NEWER))
    assert codec.decode(struct.pack(">bI", 0, 900) + encode(usage())[5:], UsageRecorded)


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ({**NEWER, "name": "Other"}, "announced for .*UsageRecorded and defines inferlog.usage.v1.Other"),
        ({**NEWER, "namespace": "inferlog.other.v1"}, "defines inferlog.other.v1.UsageRecorded"),
        ("long", "defines"),
        ([NEWER], "defines"),
    ],
    ids=["name", "namespace", "no record", "union"],
)
def test_a_schema_of_another_record_is_not_learnt(definition: Any, words: str) -> None:
    codec = Codec(locked_schemas())
    with pytest.raises(LockfileError, match=f"schema id 900 on the log .*{words}"):
        codec.learn(announced(definition))
    with pytest.raises(UnknownSchema):
        codec.decode(struct.pack(">bI", 0, 900) + encode(usage())[5:], UsageRecorded)


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (datetime(7, 3, 1, 12, tzinfo=timezone.utc), "0007-03-01T12:00:00.000000Z"),
        (datetime(2026, 3, 1, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=2))), "2026-02-28T23:02:03.000004Z"),
    ],
)
def test_a_time_is_iso_text_in_every_year(moment: datetime, text: str) -> None:
    assert to_plain(moment) == text
    if sys.version_info >= (3, 11):  # before, it takes no Z
        assert datetime.fromisoformat(text) == moment
