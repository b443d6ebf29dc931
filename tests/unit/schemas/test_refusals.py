"""What no field may carry is refused with the field's name, written or read: every field of every record."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import pytest

from schemas.codec import DecodeError, EncodeError, decode, encode
from schemas.datum import Shape
from schemas.facts import RECORD_TYPES, Record
from schemas.ranges import FIRST_MOMENT, LAST_MOMENT, LONG_MAX, Moments, Range, Text
from schemas.records import DeadLetter, InferenceFinished, Outcome
from schemas.tensors import Tensor
from tests.factories import encode_unchecked, requested, usage

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


def _plain_hint(hint: Any) -> tuple[Any, bool]:
    """The hint without None, and whether None was in it."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = [a for a in get_args(hint) if a is not type(None)]
        return inner, True
    return hint, False


def _sample(hint: Any) -> Any:
    hint, _ = _plain_hint(hint)
    origin = get_origin(hint)
    if origin is Annotated:
        bounds = get_args(hint)[1]
        return bounds.example if isinstance(bounds, Text) else NOON if isinstance(bounds, Moments) else bounds.low
    if origin is tuple:
        return (_sample(get_args(hint)[0]),)
    if origin is not None and issubclass(origin, Mapping):
        return {"items": 1}
    if hint is Tensor:
        return Tensor(name="x", datatype="FP32", shape=(1,), data=bytes(4))
    if issubclass(hint, Enum):
        return list(hint)[-1]
    known = {str: "text", bytes: b"bytes", UUID: UUID(int=7), datetime: NOON}
    return known[hint] if hint in known else sample(hint)


def sample(cls: Any) -> Any:
    """A record of this class with every field set."""
    hints = get_type_hints(cls, include_extras=True)
    return cls(**{f.name: _sample(hints[f.name]) for f in fields(cls)} | _TOGETHER.get(cls, {}))


#: What goes with the other fields' samples, or is ruled out by them.
_TOGETHER: dict[Any, dict[str, Any]] = {
    InferenceFinished: {"outcome": Outcome.SUCCEEDED, "error_code": None, "error_message": None},
    DeadLetter: {"value_size_bytes": 5, "value_sha256": None},
}


def _bad(hint: Any) -> Iterator[Any]:
    """Values that a field of this type must refuse."""
    hint, nullable = _plain_hint(hint)
    if not nullable:
        yield None
    origin = get_origin(hint)
    if origin is Annotated:
        kind, bounds = get_args(hint)
        if isinstance(bounds, Range):
            yield from (1.0, True, "1", bounds.low - 1, bounds.high + 1, 2**64)
            yield from () if bounds.never is None else (bounds.never,)
            return
        yield from (one for one in _bad(kind) if one is not None)
        yield from ("",) if isinstance(bounds, Text) else (NOON.replace(minute=1),)
    elif origin is tuple:
        yield from ([], "text", (object(),), (1.5,))
    elif origin is not None and issubclass(origin, Mapping):
        yield from ([("items", 1)], {"items": 1.5}, {"items": True}, {"items": 2**63}, {1: 1}, {"items": None})
        yield {"items": "1"}
    elif hint is str:
        yield from (1, b"bytes", "\ud800", UUID(int=1))
    elif hint is bytes:
        yield from ("text", bytearray(b"x"), 1)
    elif hint is datetime:
        yield from (datetime(2026, 3, 1, 12), 1_780_000_000, "2026-03-01T12:00:00Z", NOON.date())  # noqa: DTZ001
        yield from (FIRST_MOMENT - timedelta(hours=1), LAST_MOMENT + timedelta(hours=1))
    elif hint is UUID:
        yield from (str(UUID(int=1)), 1, b"x" * 16)
    elif is_dataclass(hint):
        yield from ({}, "text")
    else:
        yield from ("SUCCEEDED", 1, hint.UNKNOWN)


CASES = [
    pytest.param(cls, f.name, bad, id=f"{cls.__name__}.{f.name}={bad!r:.20}")
    for cls in RECORD_TYPES
    for f in fields(cls)
    for bad in _bad(get_type_hints(cls, include_extras=True)[f.name])
]


@pytest.mark.parametrize(("cls", "name", "bad"), CASES)
def test_a_bad_value_is_refused_with_the_fields_name(cls: type[Record], name: str, bad: object) -> None:
    good: Any = sample(cls)
    encode(good)
    with pytest.raises(EncodeError, match=rf"^{cls.__name__}\.{name}\b.*expected .*, found"):
        encode(replace(good, **{name: bad}))


def _careless() -> Iterator[Any]:
    """Records with one integer that no field of ours may hold and that Avro writes all the same."""
    for cls in RECORD_TYPES:
        for path, build, bounds in _integers(cls):
            for bad in {bounds.low - 1, bounds.high + 1, bounds.never} - {None}:
                if -LONG_MAX - 1 <= bad <= LONG_MAX:
                    yield pytest.param(build(bad), path, bad, id=f"{cls.__name__}.{path}={bad}")


def _integers(cls: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every integer of a record, at every depth: its path, what makes the record with another value, its range."""
    good = sample(cls)
    for f in fields(cls):
        yield from _integers_of(
            f.name, get_type_hints(cls, include_extras=True)[f.name], lambda v, f=f: replace(good, **{f.name: v})
        )


def _integers_of(path: str, hint: Any, build: Any) -> Iterator[tuple[str, Any, Any]]:
    hint, _ = _plain_hint(hint)
    origin = get_origin(hint)
    if origin is Annotated:
        if isinstance(get_args(hint)[1], Range):
            yield path, build, get_args(hint)[1]
    elif origin is tuple:
        inner = get_args(hint)[0]
        yield from _integers_of(f"{path}[1]", inner, lambda v: build((_sample(inner), v)))
    elif origin is not None and issubclass(origin, Mapping):
        yield f"{path}['items']", lambda v: build({"requests": 1, "items": v}), get_args(get_args(hint)[1])[1]
    elif is_dataclass(hint) and hint is not Tensor:  # tensors and blobs check themselves when they are made
        yield from ((f"{path}.{p}", lambda v, b=b: build(b(v)), bounds) for p, b, bounds in _integers(hint))


@pytest.mark.parametrize(("record", "path", "bad"), list(_careless()))
def test_an_integer_of_a_careless_writer_is_refused_with_its_place(record: Record, path: str, bad: int) -> None:
    with pytest.raises(DecodeError) as refused:
        decode(encode_unchecked(record), type(record))
    assert refused.value.reason.startswith(f"{type(record).__name__}.{path}: expected an integer from ")
    assert f"found {bad} (int)" in refused.value.reason


BLOB = {"key": "blobs/x", "sha256": "0" * 64, "size_bytes": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": [2, -1]}, r"InferenceRequested\.inputs\[0\]\.shape\[1\]: expected an integer from 0 .*, found -1"),
        ({"shape": [2**62] * 300_000}, "has 300000 dimensions, expected at most 32"),
        ({"blob": {**BLOB, "key": ""}}, "a blob has no key"),
        ({"blob": {**BLOB, "sha256": "0" * 63}}, "blob blobs/x: sha256 is '0{63}', expected 64 hex digits"),
        ({"blob": {**BLOB, "size_bytes": 0}}, r"inputs\[0\]\.blob\.size_bytes: expected an integer from 1 .*, found 0"),
    ],
)
def test_a_tensor_that_is_none_is_refused_when_it_is_read(changes: dict[str, Any], words: str) -> None:
    good = requested()
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1], "data": b"", "blob": BLOB}
    assert decode(encode_unchecked(good, inputs=[tensor]), type(good)).inputs[0].blob
    with pytest.raises(DecodeError, match=words):
        decode(encode_unchecked(good, inputs=[tensor | changes]), type(good))


def test_a_symbol_that_nobody_writes_is_read_all_the_same() -> None:
    for cls in RECORD_TYPES:
        good: Any = sample(cls)
        unknown = {f.name: type(v).UNKNOWN for f in fields(cls) if isinstance(v := getattr(good, f.name), Enum)}
        record = replace(good, **unknown)
        assert decode(encode_unchecked(record), cls) == record


MOMENTS_OF = [(cls, name) for cls in RECORD_TYPES for name in Shape(cls).moments]


@pytest.mark.parametrize(("cls", "name"), MOMENTS_OF)
def test_a_moment_is_within_two_centuries_written_and_read(cls: Any, name: str) -> None:
    good: Any = sample(cls)
    for at in (FIRST_MOMENT, LAST_MOMENT, FIRST_MOMENT.astimezone(timezone(timedelta(hours=-11)))):
        record = replace(good, **{name: at})
        assert decode(encode(record), cls) == record
    hour = timedelta(hours=1)
    far = (datetime.min.replace(tzinfo=timezone(hour)), datetime.max.replace(tzinfo=timezone(-hour)))
    for at in (FIRST_MOMENT - hour, LAST_MOMENT + hour, *far):
        with pytest.raises(
            EncodeError, match=rf"^{cls.__name__}\.{name}: expected a time from 2000-01-01 to 2200-01-01"
        ):
            encode(replace(good, **{name: at}))
    for at in (FIRST_MOMENT - hour, LAST_MOMENT + hour, datetime(1, 1, 1, tzinfo=timezone.utc)):
        with pytest.raises(
            DecodeError, match=rf"^{cls.__name__}\.{name}: expected a time from 2000-01-01 to 2200-01-01"
        ):
            decode(encode_unchecked(replace(good, **{name: at})), cls)
    for micros in (2**62, -(2**62), LONG_MAX):  # Python has no such times
        with pytest.raises(DecodeError, match=rf"{name}.*: expected a time from 2000-01-01 to 2200-01-01"):
            decode(encode_unchecked(good, **{name: micros}), cls)


def test_a_record_that_was_good_does_not_make_its_like_good() -> None:
    """The types of good records are remembered; their values are looked at every time."""
    encode(usage(quantities={"items": 1}))
    with pytest.raises(EncodeError, match=r"quantities\['items'\]"):
        encode(usage(quantities={"items": -1}))
    with pytest.raises(EncodeError, match="occurred_at"):
        encode(usage(occurred_at=datetime(2026, 3, 1)))  # noqa: DTZ001


def test_the_path_leads_into_nested_records() -> None:
    record: Any = sample(next(c for c in RECORD_TYPES if c.__name__ == "InferenceRequested"))
    charge = replace(record.limiter_buckets[0], cost=0)
    with pytest.raises(EncodeError, match=r"limiter_buckets\[0\]\.cost: expected an integer from 1"):
        encode(replace(record, limiter_buckets=(charge,)))


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(EncodeError, match="dict is no record"):
        encode({"event_id": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", RECORD_TYPES)
def test_times_come_back_as_the_same_moment_whatever_their_zone(cls: Any) -> None:
    from zoneinfo import ZoneInfo

    record = replace(sample(cls), occurred_at=NOON.astimezone(ZoneInfo("Asia/Kolkata")))
    back = decode(encode(record), cls)
    assert back == record
    assert back.occurred_at.utcoffset() is not None
