"""What a schema's docs say a field never holds is refused, written and read, and what is just within is not.

The docs are looked through for the words that state a bound, so that a new one without a line here fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from schemas.codec import DecodeError, EncodeError, decode, encode
from schemas.facts import RECORD_TYPES
from schemas.lockfile import versions_of
from schemas.outline import children, outline
from schemas.ranges import INT_MAX, LONG_MAX
from schemas.records import DeadLetter, InferenceFinished, Outcome
from schemas.tensors import BYTES, ELEMENT_SIZE_BYTES, Blob, Tensor, TensorError
from tests.factories import encode_unchecked, finished, floats
from tests.unit.schemas.test_refusals import sample

STATES_A_BOUND = re.compile(
    r"at least|from 1|never|hex digits|whole hour|lower case|three-letter|empty|unless|null when succeeded"
    r"|null when .* set|null when the value is here|datatype:",
    re.IGNORECASE,
)
#: Fields whose docs have such words and state no bound of their value.
NO_BOUND = {
    "InferenceRequested.key_id": "which of the key's two parts it is",
    "InferenceRequested.limiter_buckets": "when it is empty, which it may be",
    "InferenceRequested.inputs[].data": "Tensor refuses to be made with both data and a blob (test_tensors)",
    "InferenceFinished.outputs[].data": "the same",
    "InferenceRequested.inputs[].blob": "the same",
    "InferenceFinished.outputs[].blob": "the same",
    "KeyChanged.label": "that it may be empty",
    "KeyChanged.models": "when it is empty, which it may be",
    "KeyChanged.operations": "the same",
}


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Values just within and just without, of the field at the end of `path`."""

    good: tuple[Any, ...]
    bad: tuple[Any, ...]


def integers(low: int, high: int) -> Bound:
    # Below the type there is no Avro value to read.
    return Bound(good=(low, high), bad=tuple(n for n in (low - 1, high + 1)))


AT_LEAST_0, AT_LEAST_1 = integers(0, LONG_MAX), integers(1, LONG_MAX)
COUNT, POSITIVE = integers(0, INT_MAX), integers(1, INT_MAX)
HEX_64 = Bound(good=("0" * 64, "9af" + "f" * 61), bad=("0" * 63, "0" * 65, "A" * 64, "g" * 64, "", "0" * 64 + "\n"))
NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
IST = timezone(timedelta(hours=5, minutes=30))
WHOLE_HOUR = Bound(
    good=(NOON, NOON.astimezone(IST)),
    bad=(NOON.replace(minute=59), NOON.replace(second=1), NOON.replace(microsecond=1), NOON.replace(tzinfo=IST)),
)
NAMED = Bound(good=(), bad=("UNKNOWN",))
DATATYPE = Bound(good=(), bad=("FP31", "fp32", "", "FP32 "))

BOUNDS: dict[str, Bound] = {
    "InferenceRequested.version": HEX_64,
    "InferenceRequested.item_count": POSITIVE,
    "InferenceRequested.limiter_buckets[].interval_us": AT_LEAST_1,
    "InferenceRequested.limiter_buckets[].burst": AT_LEAST_1,
    "InferenceRequested.limiter_buckets[].cost": AT_LEAST_1,
    "InferenceRequested.limiter_buckets[].remaining": AT_LEAST_0,
    "InferenceRequested.limiter_buckets[].shares": POSITIVE,
    "InferenceRequested.limiter": NAMED,
    "InferenceFinished.version": HEX_64,
    "InferenceFinished.outcome": NAMED,
    "InferenceFinished.queue_us": AT_LEAST_0,
    "UsageRecorded.version": HEX_64,
    "DeadLetter.attempts": POSITIVE,
    "ModelPublished.version": HEX_64,
    "RouteChanged.version": HEX_64,
    "RouteChanged.previous_version": HEX_64,
    "RouteChanged.spread": POSITIVE,
    "RouteChanged.change": NAMED,
    "RouteChanged.canaries[].version": HEX_64,
    "RouteChanged.pins[].version": HEX_64,
    "KeyChanged.change": NAMED,
    "KeyChanged.requests_per_s": POSITIVE,
    "KeyChanged.burst": POSITIVE,
    "KeyChanged.limits[].amount": AT_LEAST_1,
    "KeyChanged.limits[].window_s": POSITIVE,
    "KeyChanged.limits[].burst": AT_LEAST_1,
    "KeyChanged.max_concurrent": AT_LEAST_1,
    "CustomerChanged.change": NAMED,
    "CustomerChanged.requests_per_s": POSITIVE,
    "CustomerChanged.burst": POSITIVE,
    "CustomerChanged.limits[].amount": AT_LEAST_1,
    "CustomerChanged.limits[].window_s": POSITIVE,
    "CustomerChanged.limits[].burst": AT_LEAST_1,
    "CustomerChanged.max_concurrent": AT_LEAST_1,
    "CustomerChanged.spend_cap.amount_micros": AT_LEAST_0,
    "CustomerChanged.spend_cap.currency": Bound(good=("eur", "usd"), bad=("EUR", "eu", "")),
    "PriceBookPublished.currency": Bound(good=("eur", "usd"), bad=("EUR", "eu", "euro", "e1r", "")),
    "BillingAdjusted.hour": WHOLE_HOUR,
    "BillingAdjusted.units": Bound(good=(-LONG_MAX, -1, 1, LONG_MAX), bad=(0,)),
    "BillingAdjusted.reason": Bound(good=("x", " x\n"), bad=("", " ", "\n\t")),
    "SchemaPublished.schema_id": POSITIVE,
    "SchemaPublished.version": POSITIVE,
    "SchemaPublished.fingerprint": Bound(good=("0" * 16, "f" * 16), bad=("0" * 15, "0" * 17, "F" * 16, "")),
}
#: Values of maps and lists, and fields that others rule out: the tests below have them.
ELSEWHERE = {
    "InferenceRequested.inputs[].datatype",
    "InferenceRequested.inputs[].shape",
    "InferenceRequested.inputs[].blob.sha256",
    "InferenceRequested.inputs[].blob.size_bytes",
    "InferenceFinished.outputs[].datatype",
    "InferenceFinished.outputs[].shape",
    "InferenceFinished.outputs[].blob.sha256",
    "InferenceFinished.outputs[].blob.size_bytes",
    "InferenceFinished.outputs",
    "InferenceFinished.quantities",
    "InferenceFinished.error_code",
    "InferenceFinished.error_message",
    "UsageRecorded.quantities",
    "PriceBookPublished.amounts_micros",
    "DeadLetter.value",
    "DeadLetter.value_sha256",
    "DeadLetter.value_size_bytes",
}


def documented() -> Iterator[str]:
    """Every field of the newest schemas whose doc states a bound, by its path."""
    for cls in RECORD_TYPES:
        waiting = [(cls.__name__, outline(versions_of(cls.SCHEMA)[-1].definition()))]
        while waiting:
            path, node = waiting.pop()
            for field in node.fields:
                if STATES_A_BOUND.search(field.doc):
                    yield f"{path}.{field.name}"
            waiting += list(children(path, node))


def test_every_bound_that_the_docs_state_is_looked_at_here() -> None:
    assert set(documented()) == BOUNDS.keys() | NO_BOUND.keys() | ELSEWHERE


def with_value(record: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if not rest:
        return replace(record, **{name: value})
    first = name.removesuffix("[]")
    if first == name:
        return replace(record, **{name: with_value(getattr(record, name), rest, value)})
    return replace(record, **{first: (with_value(getattr(record, first)[0], rest, value),)})


KINDS = {cls.__name__: cls for cls in RECORD_TYPES}
GOOD = [(path, value) for path, bound in BOUNDS.items() for value in bound.good]
BAD = [(path, value) for path, bound in BOUNDS.items() for value in bound.bad]


def made(path: str, value: Any) -> tuple[Any, Any]:
    """The record with this value, and its class."""
    name, *rest = path.split(".")
    cls: Any = KINDS[name]
    good = sample(cls)
    if isinstance(value, str) and value == "UNKNOWN":
        value = type(getattr(good, rest[0])).UNKNOWN
    return with_value(good, rest, value), cls


@pytest.mark.parametrize(("path", "value"), GOOD)
def test_what_is_just_within_is_written_and_read(path: str, value: Any) -> None:
    record, cls = made(path, value)
    assert decode(encode(record), cls) == record


@pytest.mark.parametrize(("path", "value"), BAD)
def test_what_is_just_without_is_refused_written_and_read(path: str, value: Any) -> None:
    record, cls = made(path, value)
    place = rf"^{re.escape(path).replace(re.escape('[]'), re.escape('[0]'))}: expected "
    with pytest.raises(EncodeError, match=place):
        encode(record)
    if value == "UNKNOWN" or (isinstance(value, int) and not -LONG_MAX <= value <= LONG_MAX):
        return  # read from newer writers; or nothing that Avro could write
    with pytest.raises(DecodeError, match=place):
        decode(encode_unchecked(record), cls)


@pytest.mark.parametrize("name", ["UsageRecorded.quantities", "PriceBookPublished.amounts_micros"])
def test_the_values_of_a_map_are_at_least_0(name: str) -> None:
    for value in (0, LONG_MAX):
        record, cls = made(name, {"items": value})
        assert decode(encode(record), cls) == record
    record, cls = made(name, {"requests": 1, "items": -1})
    with pytest.raises(EncodeError, match=rf"{name}\['items'\]: expected an integer from 0"):
        encode(record)
    with pytest.raises(DecodeError, match=rf"{name}\['items'\]: expected an integer from 0"):
        decode(encode_unchecked(record), cls)


@pytest.mark.parametrize("datatype", [*ELEMENT_SIZE_BYTES, BYTES])
def test_a_tensor_is_of_a_datatype_that_there_is(datatype: str) -> None:
    blob = Blob(key="blobs/x", sha256="0" * 64, size_bytes=1)
    tensor = Tensor(name="x", datatype=datatype, shape=(2,), data=b"", blob=blob)
    record = finished(outputs=(tensor,))
    assert decode(encode(record), InferenceFinished) == record
    record = finished(outputs=(replace(tensor, datatype=datatype + "1"),))
    with pytest.raises(EncodeError, match=r"outputs\[0\]\.datatype: expected one of BOOL"):
        encode(record)
    with pytest.raises(DecodeError, match=r"outputs\[0\]\.datatype: expected one of BOOL"):
        decode(encode_unchecked(record), InferenceFinished)


@pytest.mark.parametrize("changes", [{"sha256": "0" * 63}, {"sha256": "A" * 64}, {"size_bytes": 0}, {"key": ""}])
def test_a_blob_out_of_bounds_cannot_be_made(changes: dict[str, Any]) -> None:
    blob = Blob(key="blobs/x", sha256="0" * 64, size_bytes=1)
    with pytest.raises(TensorError):
        replace(blob, **changes)
    with pytest.raises(TensorError, match="negative"):
        replace(floats("x", 1.0), shape=(-1, 1))


FAILED = finished(outcome=Outcome.FAILED, error_code="x", error_message="y")
LETTER: Any = sample(DeadLetter)


@pytest.mark.parametrize(
    ("good", "changes", "words"),
    [
        (FAILED, {"outputs": (floats("x", 1.0),)}, "outputs: expected nothing unless succeeded"),
        (FAILED, {"quantities": {"items": 0}}, "quantities: expected nothing unless succeeded"),
        (replace(FAILED, outcome=Outcome.EXPIRED), {"quantities": {"items": 1}}, "quantities: expected nothing"),
        (replace(FAILED, outcome=Outcome.CANCELLED), {"quantities": {"items": 1}}, "quantities: expected nothing"),
        (finished(), {"error_code": ""}, "error_code: expected None for what succeeded"),
        (finished(), {"error_message": "x"}, "error_message: expected None for what succeeded"),
        (LETTER, {"value_sha256": "0" * 64}, "value_sha256: expected None beside a value"),
        (LETTER, {"value_size_bytes": 4}, "value_size_bytes: expected the value's size, 5"),
        (
            replace(LETTER, value=None),
            {"value_sha256": "0" * 64, "value_size_bytes": None},
            "value_size_bytes: expected",
        ),
        (replace(LETTER, value=None), {"value_sha256": "0" * 63}, "value_sha256: expected 64 hex digits"),
        (replace(LETTER, value=None), {"value_size_bytes": -1}, "value_size_bytes: expected an integer from 0"),
    ],
)
def test_what_other_fields_rule_out_is_refused_written_and_read(good: Any, changes: dict[str, Any], words: str) -> None:
    assert decode(encode(good), type(good)) == good
    with pytest.raises(EncodeError, match=words):
        encode(replace(good, **changes))
    with pytest.raises(DecodeError, match=words):
        decode(encode_unchecked(replace(good, **changes)), type(good))


def test_of_an_outcome_that_is_unknown_here_nothing_is_ruled_out() -> None:
    unknown = replace(FAILED, outcome=Outcome.UNKNOWN, outputs=(floats("x", 1.0),), quantities={"items": 1})
    assert decode(encode_unchecked(unknown), InferenceFinished) == unknown
