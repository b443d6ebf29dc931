"""The claim check: which tensors leave their record, and whether what comes back for them is what left. Pure.

A record carries small tensors itself. Of a large one it carries where the elements lie, how many bytes they are and
their digest, so that whoever fetches them needs to trust nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from schemas.tensors import Blob, Tensor, TensorError

#: Where blobs lie in the bucket; each request's under its own id, so that a blob lives exactly as long as its record.
BLOB_PREFIX = "blobs/"
#: The most tensor data one record may stand for. A result of this size becomes some 160 MB of JSON at the gateway,
#: which renders and writes it in pieces.
LARGEST_BYTES = 32 * 1024 * 1024


class BlobLost(LookupError):
    """The bytes of a tensor are no longer where its record says; the message names the tensor."""


class BlobAltered(ValueError):
    """The bytes found for a tensor are not the ones its record names; the message names the tensor."""


def data_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensor data that these carry themselves."""
    return sum(len(t.data) for t in tensors)


def blob_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensor data that these refer to."""
    return sum(t.blob.size_bytes for t in tensors if t.blob is not None)


def leaving(sizes_bytes: Sequence[int], *, inline_bytes: int) -> frozenset[int]:
    """Which of these, by index, leave their record: the largest first, until the rest is within `inline_bytes`."""
    rest_bytes = sum(sizes_bytes)
    found: set[int] = set()
    for index in sorted(range(len(sizes_bytes)), key=lambda i: sizes_bytes[i], reverse=True):
        if rest_bytes <= inline_bytes:
            break
        found.add(index)
        rest_bytes -= sizes_bytes[index]
    return frozenset(found)


def blob_key(request_id: UUID, sha256: str) -> str:
    """Where the bytes with this digest of this request lie."""
    return f"{BLOB_PREFIX}{request_id}/{sha256}"


def require_own(tensor: Tensor, request_id: UUID) -> None:
    """Raise BlobAltered unless the blob lies where this request's do.

    A record that says another key was not written here, and would make its reader fetch any object of the bucket.
    """
    blob = tensor.blob
    if blob is not None and blob.key != blob_key(request_id, blob.sha256):
        raise BlobAltered(
            f"tensor '{tensor.name}': expected a key {blob_key(request_id, '<sha256>')} of its own digest, "
            f"found '{blob.key[:200]}'"
        )


def checked_in(
    tensors: Sequence[Tensor], request_id: UUID, *, inline_bytes: int
) -> tuple[tuple[Tensor, ...], Mapping[str, bytes]]:
    """The tensors as their record is to carry them, and the bytes that must be kept before, by key."""
    chosen = leaving([len(t.data) for t in tensors], inline_bytes=inline_bytes)
    kept: dict[str, bytes] = {}
    carried = []
    for index, tensor in enumerate(tensors):
        if index in chosen:
            sha256 = hashlib.sha256(tensor.data).hexdigest()
            blob = Blob(key=blob_key(request_id, sha256), sha256=sha256, size_bytes=len(tensor.data))
            kept[blob.key] = tensor.data
            tensor = replace(tensor, data=b"", blob=blob)
        carried.append(tensor)
    return tuple(carried), kept


def redeemed(tensor: Tensor, blob: Blob, data: bytes) -> Tensor:
    """The tensor with its elements. Raises BlobAltered when `data` has another length or digest, or does not fit it."""
    if len(data) != blob.size_bytes:
        found = f"{len(data)}" if len(data) < blob.size_bytes else "more"
        raise BlobAltered(f"tensor '{tensor.name}': expected {blob.size_bytes} bytes under {blob.key}, found {found}")
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != blob.sha256:
        raise BlobAltered(f"tensor '{tensor.name}': expected sha256 {blob.sha256} under {blob.key}, found {sha256}")
    try:
        return replace(tensor, data=data, blob=None)
    except TensorError as error:
        raise BlobAltered(f"{error} under {blob.key}") from error
