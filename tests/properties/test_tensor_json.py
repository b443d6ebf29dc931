"""Tensors survive the journey through JSON, and nothing that is sent instead of one is more than refused."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import BadInput
from api.surfaces.tensor_json import parse_inputs, render_tensor
from schemas.manifest import TensorSpec
from tests.fakes import manifest

ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "BOOL": st.booleans(),
    **{f"INT{n}": st.integers(-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (8, 16, 32, 64)},
    **{f"UINT{n}": st.integers(0, 2**n - 1) for n in (8, 16, 32, 64)},
    **{f"FP{n}": st.floats(width=n, allow_nan=False, allow_infinity=False) for n in (16, 32, 64)},
    "BYTES": st.text(st.characters(blacklist_categories=("Cs",)), max_size=8),
}


@st.composite
def sent_tensors(draw: st.DrawFn) -> dict[str, Any]:
    datatype = draw(st.sampled_from(sorted(ELEMENTS)))
    shape = [draw(st.integers(1, 4)), *draw(st.lists(st.integers(0, 3), max_size=2))]
    size = math.prod(shape)
    data = draw(st.lists(ELEMENTS[datatype], min_size=size, max_size=size))
    return {"name": "x", "datatype": datatype, "shape": shape, "data": data}


def nested(data: list[Any], shape: list[int]) -> list[Any]:
    for size in reversed(shape[1:]):
        data = (
            [data[i : i + size] for i in range(0, len(data), size)]
            if size
            else [[] for _ in range(math.prod(shape[:1]))]
        )
    return data


@given(sent_tensors())
def test_a_tensor_comes_back_as_it_was_sent(sent: dict[str, Any]) -> None:
    spec = TensorSpec(name="x", datatype=sent["datatype"], shape=tuple(-1 for _ in sent["shape"]))
    (tensor,), items = parse_inputs([orjson.loads(orjson.dumps(sent))], manifest(inputs=(spec,)))
    assert items == sent["shape"][0]
    assert orjson.loads(orjson.dumps(render_tensor(tensor))) == orjson.loads(orjson.dumps(sent))


@given(sent_tensors().filter(lambda t: 0 not in t["shape"]))
def test_nesting_changes_nothing(sent: dict[str, Any]) -> None:
    spec = TensorSpec(name="x", datatype=sent["datatype"], shape=tuple(sent["shape"]))
    m = manifest(inputs=(spec,))
    as_nested = {**sent, "data": nested(sent["data"], sent["shape"])}
    assert parse_inputs([as_nested], m) == parse_inputs([sent], m)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.sampled_from(["name", "shape", "datatype", "data"]),
    json_values,
    st.sampled_from(["FP32", "INT8", "BOOL", "BYTES"]),
)
def test_whatever_takes_a_fields_place_is_refused_by_name_or_is_a_valid_tensor(
    field: str, value: Any, datatype: str
) -> None:
    spec = TensorSpec(name="x", datatype=datatype, shape=(-1, 2))
    good = {
        "name": "x",
        "datatype": datatype,
        "shape": [1, 2],
        "data": {"BYTES": ["", ""], "BOOL": [True, False]}.get(datatype, [1, 2]),
    }
    try:
        (tensor,), _ = parse_inputs([{**good, field: value}], manifest(inputs=(spec,)))
        shape, words = tensor.shape, ""
    except BadInput as refused:
        shape, words = (), refused.message
    assert "input" in words if words else shape[1] == 2


@given(json_values)
def test_no_json_at_all_is_more_than_refused(document: Any) -> None:
    with pytest.raises(BadInput):
        parse_inputs(document, manifest())
