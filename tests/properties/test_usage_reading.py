"""The short way to a usage row makes of every value what the codec makes of it, or leaves it to the codec."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import DecodeError, decode, encode
from schemas.records import UsageRecorded
from streams.ledger.projections import LocatedUsage, UnfitRecord, check_fit, content_digest
from streams.ledger.raw import RawRecord
from streams.ledger.reading import read_usage
from tests.factories import encode_unchecked, usage
from tests.strategies import records_of


def source_of(value: bytes) -> RawRecord:
    return RawRecord(topic="t", partition=0, offset=1, follows=1, key=b"k", value=value)


def by_the_codec(source: RawRecord) -> LocatedUsage | None:
    try:
        record = decode(source.value, UsageRecorded)
        check_fit(record)
    except (DecodeError, UnfitRecord):
        return None
    return LocatedUsage(record=record, source=source, digest=content_digest(record))


@given(records_of(UsageRecorded))
def test_a_record_is_read_as_the_codec_reads_it(record: UsageRecorded) -> None:
    source = source_of(encode(record))
    assert read_usage(source) in (None, by_the_codec(source))


@given(records_of(UsageRecorded), st.integers(0, 10_000), st.binary(max_size=3), st.integers(0, 3))
def test_bytes_that_are_nearly_a_record_are_never_taken_for_another(
    record: UsageRecorded, at: int, put: bytes, cut: int
) -> None:
    value = encode(record)
    at %= len(value) + 1
    source = source_of(value[:at] + put + value[at + cut :])
    found = read_usage(source)
    assert found is None or found == by_the_codec(source)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "event_id": st.sampled_from(["", "A" * 32, "{" + "a" * 32 + "}", "AB" * 16, "a-" * 16 + "a" * 16]),
            "request_id": st.sampled_from(["nobody", "a" * 32, "urn:uuid:" + "a" * 32, "0" * 36]),
            "occurred_at": st.integers(-(2**63), 2**63 - 1),
            "version": st.sampled_from(["", "A" * 64, "a" * 63, "a" * 64 + "\n"]),
            "customer_id": st.just(""),
            "quantities": st.sampled_from([{}, {"": 1}, {"items": -1}, {"items": 2**63 - 1}]),
        },
    )
)
def test_what_a_careless_writer_wrote_is_left_to_the_codec(changes: dict[str, object]) -> None:
    source = source_of(encode_unchecked(usage(), **changes))
    found = read_usage(source)
    assert found is None or found == by_the_codec(source)


def test_an_ordinary_record_goes_the_short_way() -> None:
    source = source_of(encode(usage()))
    assert read_usage(source) == by_the_codec(source) is not None
