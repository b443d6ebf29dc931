"""Hypothesis strategies for every record of the log, read off their type hints: any value that may be written."""

from __future__ import annotations

import struct
import types
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from hypothesis import strategies as st

from schemas.facts import RECORD_TYPES, Record
from schemas.ranges import FIRST_MOMENT, LAST_MOMENT, LONG_MAX, Moments, Range, Text
from schemas.records import DeadLetter, InferenceFinished, Outcome
from schemas.tensors import Blob, Tensor, bytes_tensor

texts = st.text(st.characters(codec="utf-8"), max_size=40)
times = st.datetimes(
    FIRST_MOMENT.replace(tzinfo=None), LAST_MOMENT.replace(tzinfo=None), timezones=st.just(timezone.utc)
)


def _bounded(bounds: Range | Text | Moments) -> st.SearchStrategy[Any]:
    if isinstance(bounds, Moments):
        hours = st.integers(0, (bounds.high - bounds.low) // timedelta(hours=1))
        return hours.map(lambda n: bounds.low + timedelta(hours=n)) if bounds.whole_hours else times
    if isinstance(bounds, Text):
        return st.from_regex(bounds.pattern, fullmatch=True, alphabet=st.characters(codec="utf-8"))
    return st.integers(bounds.low, bounds.high).filter(lambda n: n != bounds.never)


def _consistent(record: Any) -> Any:
    """The record without what its class says its other fields rule out."""
    if isinstance(record, InferenceFinished):
        if record.outcome is Outcome.SUCCEEDED:
            return replace(record, error_code=None, error_message=None)
        return replace(record, outputs=(), quantities={})
    if isinstance(record, DeadLetter):
        size_bytes = record.value_size_bytes if record.value is None else len(record.value)
        sha256 = record.value_sha256 if record.value is None and size_bytes is not None else None
        return replace(record, value_size_bytes=size_bytes, value_sha256=sha256)
    return record


def _value(hint: Any) -> st.SearchStrategy[Any]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([st.none() if a is type(None) else _value(a) for a in get_args(hint)])
    if origin is Annotated:
        return _bounded(get_args(hint)[1])
    if origin is tuple:
        return st.lists(_value(get_args(hint)[0]), max_size=3).map(tuple)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(texts, _value(get_args(hint)[1]), max_size=4)
    if hint is Tensor:
        return tensors
    if hint is Blob:
        return blobs
    if issubclass(hint, Enum):
        return st.sampled_from([one for one in hint if one.value != "UNKNOWN"])
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: texts,
        bytes: st.binary(max_size=50),
        UUID: st.uuids(),
        datetime: times,
    }
    return plain[hint] if hint in plain else records_of(hint)


def records_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Any record of this class."""
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{f.name: _value(hints[f.name]) for f in fields(cls)}).map(_consistent)


blobs: st.SearchStrategy[Blob] = st.builds(
    lambda key, digest, size_bytes: Blob(key=key, sha256=digest.hex(), size_bytes=size_bytes),
    texts.filter(bool),
    st.binary(min_size=32, max_size=32),
    st.integers(1, LONG_MAX),
)
tensors: st.SearchStrategy[Tensor] = st.one_of(
    st.builds(
        lambda name, values: Tensor(
            name=name, datatype="FP32", shape=(len(values),), data=struct.pack(f"<{len(values)}f", *values)
        ),
        texts,
        st.lists(st.floats(width=32), max_size=8),
    ),
    st.builds(bytes_tensor, texts, st.lists(st.binary(max_size=20), max_size=5)),
    st.builds(
        lambda name, blob: Tensor(name=name, datatype="FP32", shape=(2, 3), data=b"", blob=blob),
        texts,
        blobs,
    ),
)
records: st.SearchStrategy[Record] = st.one_of([records_of(kind) for kind in RECORD_TYPES])
