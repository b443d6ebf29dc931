from __future__ import annotations

from typing import Any

import pytest

from schemas.tensors import MAX_RANK, Blob, Tensor, TensorError, bytes_tensor


def test_data_must_fill_the_shape() -> None:
    with pytest.raises(TensorError, match=r"'x': shape \[2, 3\] of FP32 needs 24 bytes, found 4"):
        Tensor(name="x", datatype="FP32", shape=(2, 3), data=b"\x00" * 4)


def test_an_unknown_datatype_names_the_known_ones() -> None:
    with pytest.raises(TensorError, match=r"'FLOAT' is not one of BOOL, .*BYTES"):
        Tensor(name="x", datatype="FLOAT", shape=(1,), data=b"")


def test_negative_dimensions_are_refused() -> None:
    with pytest.raises(TensorError, match="negative"):
        Tensor(name="x", datatype="FP32", shape=(-1,), data=b"")


def test_the_number_of_dimensions_is_bounded_before_they_are_multiplied() -> None:
    """The product of a million huge ones takes minutes."""
    assert Tensor(name="x", datatype="UINT8", shape=(1,) * MAX_RANK, data=b"\x00").item_count == 1
    with pytest.raises(TensorError, match="'x': has 33 dimensions, expected at most 32"):
        Tensor(name="x", datatype="UINT8", shape=(1,) * (MAX_RANK + 1), data=b"\x00")


GOOD_BLOB: dict[str, Any] = {"key": "blobs/x", "sha256": "0a" * 32, "size_bytes": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": ""}, "a blob has no key"),
        ({"sha256": ""}, "blob blobs/x: sha256 is '', expected 64 hex digits"),
        ({"sha256": "0A" * 32}, "lower case"),
        ({"sha256": "0g" * 32}, "64 hex digits"),
        ({"sha256": "0a" * 32 + "\n"}, "64 hex digits"),
        ({"size_bytes": 0}, "size_bytes is 0, expected at least 1"),
    ],
)
def test_a_blob_that_can_be_none_is_refused(changes: dict[str, Any], words: str) -> None:
    Blob(**GOOD_BLOB)
    with pytest.raises(TensorError, match=words):
        Blob(**{**GOOD_BLOB, **changes})


def test_bytes_elements_come_back() -> None:
    tensor = bytes_tensor("text", [b"a", b"", "é".encode()])
    assert tensor.shape == (3,)
    assert tensor.elements() == [b"a", b"", "é".encode()]


@pytest.mark.parametrize("data", [b"\x01", b"\x05\x00\x00\x00ab", b"\x01\x00\x00\x00a"], ids=["cut", "past end", "few"])
def test_broken_bytes_elements_are_refused(data: bytes) -> None:
    with pytest.raises(TensorError, match="'text'"):
        Tensor(name="text", datatype="BYTES", shape=(2,), data=data)
