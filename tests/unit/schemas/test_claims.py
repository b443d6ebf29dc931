"""What leaves a record and what may come back for it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from uuid import UUID

import pytest

from schemas.claims import BlobAltered, blob_bytes, checked_in, data_bytes, leaving, redeemed, require_own
from schemas.codec import decode, encode
from schemas.records import InferenceRequested
from schemas.tensors import Blob, Tensor
from tests.factories import requested

ID = UUID(int=7)


def tensor(name: str, size: int, fill: int = 1) -> Tensor:
    return Tensor(name=name, datatype="UINT8", shape=(1, size), data=bytes([fill]) * size)


def test_the_threshold_itself_still_fits_the_record() -> None:
    assert leaving([600, 400], inline_bytes=1000) == frozenset()
    assert leaving([600, 401], inline_bytes=1000) == {0}


def test_the_largest_leave_until_the_rest_is_within_the_threshold() -> None:
    assert leaving([10, 500, 90, 700], inline_bytes=100) == {1, 3}
    assert leaving([10, 500, 90, 700], inline_bytes=600) == {3}
    assert leaving([5, 5, 5], inline_bytes=0) == {0, 1, 2}
    assert leaving([0, 5], inline_bytes=0) == {1}, "a tensor without elements needs no blob"


def test_what_left_is_named_by_request_and_digest_and_comes_back_the_same() -> None:
    small, large = tensor("small", 10), tensor("large", 2000)
    carried, kept = checked_in([small, large], ID, inline_bytes=1000)
    digest = hashlib.sha256(large.data).hexdigest()
    assert carried[0] == small
    assert carried[1].blob == Blob(key=f"blobs/{ID}/{digest}", sha256=digest, size_bytes=2000)
    assert (carried[1].data, kept) == (b"", {f"blobs/{ID}/{digest}": large.data})
    assert (data_bytes(carried), blob_bytes(carried)) == (10, 2000)
    assert redeemed(carried[1], carried[1].blob, kept[carried[1].blob.key]) == large


def test_the_record_is_small_and_round_trips() -> None:
    carried, _ = checked_in([tensor("large", 1_000_000)], ID, inline_bytes=1000)
    record = requested(inputs=carried)
    framed = encode(record)
    assert len(framed) < 1000
    assert decode(framed, InferenceRequested) == record


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x01" * 1999, "expected 2000 bytes under .*, found 1999"),
        (b"\x01" * 2001, "expected 2000 bytes under .*, found more"),
        (b"", "expected 2000 bytes under .*, found 0"),
        (b"\x02" * 2000, "expected sha256 .* under .*, found "),
    ],
)
def test_bytes_of_another_length_or_digest_are_refused_and_the_tensor_is_named(data: bytes, words: str) -> None:
    (carried,), _ = checked_in([tensor("large", 2000)], ID, inline_bytes=0)
    assert carried.blob is not None
    with pytest.raises(BlobAltered, match=f"tensor 'large': {words}"):
        redeemed(carried, carried.blob, data)


def test_the_right_bytes_of_another_shape_are_refused_too() -> None:
    (carried,), kept = checked_in([tensor("large", 2000)], ID, inline_bytes=0)
    assert carried.blob is not None
    with pytest.raises(BlobAltered, match="needs 1999 bytes, found 2000"):
        redeemed(replace(carried, shape=(1, 1999)), carried.blob, kept[carried.blob.key])


@pytest.mark.parametrize("forged", [{"key": "models/secret"}, {"key": "blobs/"}, {"sha256": "0" * 64}])
def test_a_blob_lies_where_its_requests_do_or_is_refused(forged: dict[str, str]) -> None:
    (carried,), _ = checked_in([tensor("large", 2000)], ID, inline_bytes=0)
    assert carried.blob is not None
    require_own(carried, ID)
    require_own(tensor("small", 1), ID)
    with pytest.raises(BlobAltered, match="tensor 'large': expected a key blobs/"):
        require_own(replace(carried, blob=replace(carried.blob, **forged)), ID)  # type: ignore[arg-type]
    with pytest.raises(BlobAltered):
        require_own(carried, UUID(int=8))
