from __future__ import annotations

import struct
from typing import Any

import orjson
import pytest

from api.errors import BadInput
from api.surfaces.tensor_json import parse_inputs, render_tensor
from schemas.manifest import Manifest, TensorSpec
from schemas.tensors import ELEMENT_SIZE_BYTES, Tensor
from tests.fakes import manifest


def takes(*specs: tuple[str, str, tuple[int, ...]]) -> Manifest:
    return manifest(inputs=tuple(TensorSpec(name=n, datatype=d, shape=s) for n, d, s in specs))


X = takes(("x", "FP32", (-1, 2)))


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2.5, -3, 4], **changes}


def test_flat_and_nested_data_are_the_same_tensor() -> None:
    flat, count = parse_inputs([entry()], X)
    nested, _ = parse_inputs([entry(data=[[1, 2.5], [-3, 4]])], X)
    assert flat == nested
    assert count == 2
    assert flat[0].data == struct.pack("<4f", 1, 2.5, -3, 4)


def test_inputs_are_put_in_the_order_of_the_signature() -> None:
    m = takes(("a", "INT8", (-1,)), ("b", "BOOL", (-1,)))
    b = {"name": "b", "datatype": "BOOL", "shape": [1], "data": [True]}
    a = {"name": "a", "datatype": "INT8", "shape": [1], "data": [-128]}
    assert [t.name for t in parse_inputs([b, a], m)[0]] == ["a", "b"]


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (None, "expected an array of tensors, found null"),
        ([1], r"inputs\[0\]: expected an object, found number"),
        ([{}], r"inputs\[0\].name: expected a string"),
        ([], "input 'x': missing; the model takes 'x' FP32"),
        ([entry(), entry()], "input 'x': given twice"),
        ([entry(name="y")], "input 'y': unknown; the model takes 'x' FP32"),
        ([entry(datatype="FP64")], "input 'x': datatype: expected 'FP32', found 'FP64'"),
        ([entry(datatype=None)], "input 'x': datatype: expected 'FP32', found null"),
        ([entry(datatype=["FP32"])], "input 'x': datatype: expected 'FP32', found array"),
        ([entry(shape=None)], "input 'x': shape: expected an array of whole numbers"),
        ([entry(shape=[2, True])], "input 'x': shape: expected an array of whole numbers"),
        ([entry(shape=[2, 2.0])], "input 'x': shape: expected an array of whole numbers"),
        ([entry(shape=[-2, 2])], "input 'x': shape: expected an array of whole numbers"),
        ([entry(shape=[4])], r"input 'x': shape: expected \[-1, 2\] \(-1: any length\), found \[4\]"),
        ([entry(shape=[2, 3])], r"found \[2, 3\]"),
        ([entry(shape=[1] * 1000)], "found 1000 dimensions"),
        ([entry(shape=[2**80, 2])], "input 'x': data: expected"),
        ([entry(data="AAAA")], "input 'x': data: expected an array, found string"),
        ([entry(data=[1, 2, 3])], "input 'x': data: expected 4 elements .* found 3"),
        ([entry(data=[1, 2, 3, None])], r"input 'x': data\[3\]: expected numbers for FP32, found null"),
        ([entry(data=[1, 2, True, 3])], r"input 'x': data\[2\]: expected numbers for FP32, found boolean"),
        ([entry(data=[1, "2", 3, 4])], r"input 'x': data\[1\]: expected numbers for FP32, found string"),
        ([entry(data=[1, 2, 3, 1e39])], "input 'x': data: an element does not fit FP32"),
        ([entry(data=[[1, 2], [3]])], "input 'x': data: expected arrays of 2 at depth 2 .* found an array of 1"),
        ([entry(data=[[1, 2], 3, 4])], "input 'x': data: expected arrays of 2 at depth 1"),
        ([entry(data=[[1, 2], 3])], "input 'x': data: expected arrays of 2 at depth 2 .* found number"),
        ([entry(data=[[[1], [2]], [[3], [4]]])], r"input 'x': data\[0\]: expected numbers for FP32, found array"),
        ([entry(shape=[0, 2], data=[])], "input 'x': holds 0 items, expected 1 to 2048 per request"),
        ([entry(shape=[2049, 2], data=[0] * 4098)], "input 'x': holds 2049 items, expected 1 to 2048 per request"),
    ],
)
def test_every_refusal_names_the_tensor_and_what_was_expected(spoilt: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        parse_inputs(spoilt, X)


def test_inputs_that_disagree_on_the_number_of_items() -> None:
    m = takes(("a", "INT8", (-1,)), ("b", "INT8", (-1,)))
    entries = [{"name": n, "datatype": "INT8", "shape": [k], "data": [0] * k} for n, k in (("a", 2), ("b", 3))]
    with pytest.raises(BadInput, match="input 'b': holds 3 items, expected 2 like input 'a'"):
        parse_inputs(entries, m)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("INT8", 128), ("INT8", -129), ("UINT8", -1), ("UINT64", 2**64), ("INT64", 2**63), ("INT32", 1.0), ("FP16", 1e6)],
)
def test_numbers_that_do_not_fit(datatype: str, value: float) -> None:
    m = takes(("x", datatype, (-1,)))
    # Through the parser, as a caller would send it: a number past 64 bits becomes a float there.
    sent = orjson.loads(f'[{{"name":"x","datatype":"{datatype}","shape":[1],"data":[{value}]}}]')
    with pytest.raises(BadInput, match="input 'x': data"):
        parse_inputs(sent, m)


def test_text_is_stored_with_its_length() -> None:
    m = takes(("t", "BYTES", (-1,)))
    tensors, _ = parse_inputs([{"name": "t", "datatype": "BYTES", "shape": [2], "data": ["é", ""]}], m)
    assert tensors[0].elements() == ["é".encode(), b""]
    assert render_tensor(tensors[0])["data"] == ["é", ""]


@pytest.mark.parametrize("datatype", sorted(ELEMENT_SIZE_BYTES))
def test_every_datatype_is_rendered(datatype: str) -> None:
    zero = Tensor(name="x", datatype=datatype, shape=(1, 1), data=bytes(ELEMENT_SIZE_BYTES[datatype]))
    rendered = orjson.loads(orjson.dumps(render_tensor(zero)))
    assert rendered == {
        "name": "x",
        "datatype": datatype,
        "shape": [1, 1],
        "data": [False if datatype == "BOOL" else 0],
    }


def test_numbers_that_json_cannot_carry_become_null() -> None:
    nan = Tensor(name="x", datatype="FP32", shape=(3,), data=struct.pack("<3f", float("nan"), float("inf"), 1))
    assert orjson.loads(orjson.dumps(render_tensor(nan)))["data"] == [None, None, 1.0]


def test_a_scalar() -> None:
    m = takes(("x", "FP32", (-1,)))
    with pytest.raises(BadInput, match="shape"):
        parse_inputs([{"name": "x", "datatype": "FP32", "shape": [], "data": [1]}], m)
