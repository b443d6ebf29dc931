"""Hypothesis strategies for every record of the log, read off their type hints: any value that may be written."""

from __future__ import annotations

import struct
import types
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timezone
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from hypothesis import strategies as st

from schemas.facts import RECORD_TYPES, Record
from schemas.ranges import LONG_MAX
from schemas.tensors import Blob, Tensor, bytes_tensor

texts = st.text(st.characters(codec="utf-8"), max_size=40)
times = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(timezone.utc))  # noqa: DTZ001


def _value(hint: Any) -> st.SearchStrategy[Any]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([st.none() if a is type(None) else _value(a) for a in get_args(hint)])
    if origin is Annotated:
        bounds = get_args(hint)[1]
        return st.integers(bounds.low, bounds.high)
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
    return st.builds(cls, **{f.name: _value(hints[f.name]) for f in fields(cls)})


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
