from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import DecodeError, decode, encode
from schemas.facts import RECORD_TYPES
from schemas.lockfile import locked_schemas
from tests.fuzz import target as fuzz_target
from tests.strategies import records


@given(records)
def test_every_record_comes_back_equal(record) -> None:
    assert decode(encode(record), type(record)) == record


@given(st.binary(max_size=200), st.sampled_from(RECORD_TYPES))
def test_arbitrary_bytes_are_a_record_or_a_decode_error(value, kind) -> None:
    framed = [s.id.to_bytes(5, "big") + value for s in locked_schemas()]
    for attempt in (value, b"\x00\x00\x00\x00" + value, *framed):
        try:
            decode(attempt, kind)
        except DecodeError:
            continue


@given(records, st.data())
def test_a_damaged_record_is_a_decode_error_or_a_record_that_can_be_written_again(record, data) -> None:
    value = bytearray(encode(record))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(value)))
    for attempt in (bytes(value), bytes(value[:cut])):
        fuzz_target.check(bytes([RECORD_TYPES.index(type(record))]) + attempt)
