from __future__ import annotations

import pytest

from schemas.tensors import Tensor, TensorError, bytes_tensor


def test_data_must_fill_the_shape() -> None:
    with pytest.raises(TensorError, match=r"'x': shape \[2, 3\] of FP32 needs 24 bytes, found 4"):
        Tensor(name="x", datatype="FP32", shape=(2, 3), data=b"\x00" * 4)


def test_an_unknown_datatype_names_the_known_ones() -> None:
    with pytest.raises(TensorError, match=r"'FLOAT' is not one of BOOL, .*BYTES"):
        Tensor(name="x", datatype="FLOAT", shape=(1,), data=b"")


def test_negative_dimensions_are_refused() -> None:
    with pytest.raises(TensorError, match="negative"):
        Tensor(name="x", datatype="FP32", shape=(-1,), data=b"")


def test_bytes_elements_come_back() -> None:
    tensor = bytes_tensor("text", [b"a", b"", "é".encode()])
    assert tensor.shape == (3,)
    assert tensor.elements() == [b"a", b"", "é".encode()]


@pytest.mark.parametrize("data", [b"\x01", b"\x05\x00\x00\x00ab", b"\x01\x00\x00\x00a"], ids=["cut", "past end", "few"])
def test_broken_bytes_elements_are_refused(data: bytes) -> None:
    with pytest.raises(TensorError, match="'text'"):
        Tensor(name="text", datatype="BYTES", shape=(2,), data=data)
