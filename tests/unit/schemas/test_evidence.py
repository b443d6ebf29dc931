"""A letter keeps what a record was: its bytes up to a bound, their size and digest beyond it, and its place."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest

from schemas.codec import decode, encode
from schemas.evidence import KEY_MAX_BYTES, REASON_MAX_CHARS, VALUE_MAX_BYTES, dead_letter, without_value
from schemas.ids import dead_letter_id
from schemas.records import DeadLetter
from schemas.topics import DEAD_LETTERS
from tests.factories import NOON


@dataclass(frozen=True)
class Record:
    value: bytes | None
    key: bytes | None = b"k"
    topic: str = "ns.inference.usage.v1"
    partition: int = 3
    offset: int = 2**40


def letter_of(record: Record, reason: str = "broken") -> DeadLetter:
    letter = dead_letter(record, reason, occurred_at=NOON)
    assert decode(encode(letter), DeadLetter) == letter, "a letter can always be written"
    return letter


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("value", [b"", b"\x00", b"x" * VALUE_MAX_BYTES])
def test_a_value_is_kept_byte_for_byte_up_to_the_bound(value: bytes) -> None:
    letter = letter_of(Record(value))
    assert (letter.value, letter.value_size_bytes, letter.value_sha256) == (value, len(value), None)


def test_a_value_past_the_bound_is_left_out_and_described() -> None:
    value = b"x" * (VALUE_MAX_BYTES + 1)
    letter = letter_of(Record(value))
    assert (letter.value, letter.value_size_bytes, letter.value_sha256) == (None, len(value), sha256(value))
    assert (letter.topic, letter.partition, letter.offset) == ("ns.inference.usage.v1", 3, 2**40)
    assert letter.reason == "broken"


def test_no_value_has_neither_size_nor_digest() -> None:
    letter = letter_of(Record(None, key=None))
    assert (letter.key, letter.value, letter.value_size_bytes, letter.value_sha256) == (None, None, None, None)
    assert without_value(letter) is letter


def test_a_key_past_its_bound_is_left_out_and_the_reason_says_what_it_was() -> None:
    assert letter_of(Record(b"", key=b"k" * KEY_MAX_BYTES)).key == b"k" * KEY_MAX_BYTES
    key = b"k" * (KEY_MAX_BYTES + 1)
    letter = letter_of(Record(b"", key=key), "r" * 5000)
    assert letter.key is None
    assert letter.reason.endswith(f"(its key of {len(key)} bytes is left out, sha256 {sha256(key)})")


def test_a_reason_is_short_and_can_be_written_whatever_it_quotes() -> None:
    assert letter_of(Record(b""), "a\x00b\ud800c").reason == "a\\0b\\ud800c"
    assert letter_of(Record(b""), "é" * 5000).reason == "é" * REASON_MAX_CHARS


def test_the_largest_letter_is_far_below_what_the_topic_takes() -> None:
    record = Record(b"x" * VALUE_MAX_BYTES, key=b"k" * KEY_MAX_BYTES, topic="t" * 249)
    size_bytes = len(encode(dead_letter(record, "\U0001f4a9" * 5000, occurred_at=NOON)))
    assert size_bytes < DEAD_LETTERS.max_message_bytes / 4


def test_repetitions_share_an_event_id_and_other_places_do_not() -> None:
    record = Record(b"a")
    assert letter_of(record).event_id == letter_of(Record(b"b")).event_id
    assert letter_of(record).event_id == dead_letter_id(record.topic, record.partition, record.offset)
    assert letter_of(record).event_id != letter_of(Record(b"a", offset=4)).event_id
