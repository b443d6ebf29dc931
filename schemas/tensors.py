"""A tensor as a value: name, datatype, shape and row-major little-endian bytes.

The form that crosses every process boundary; turning it into a torch tensor is the worker's business. Sizes are
checked at construction, so a `Tensor` in hand is always consistent.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from schemas.ranges import PositiveQuantity, Quantity, Text

#: Open Inference Protocol datatypes and the size of one element in bytes; BYTES elements have no fixed size.
ELEMENT_SIZE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
}
BYTES = "BYTES"
#: The most dimensions of a tensor: no model has more, and multiplying a forged million of them takes minutes.
MAX_RANK = 32

_DATATYPES = [*ELEMENT_SIZE_BYTES, BYTES]
Datatype = Annotated[str, Text(re.compile("|".join(_DATATYPES)), f"one of {', '.join(_DATATYPES)}", "FP32")]

_SHA256 = re.compile("[0-9a-f]{64}")


class TensorError(ValueError):
    """A tensor whose datatype, shape and data do not agree; the message names the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Bytes kept outside their record, in S3 under `key`; size and digest (sha256, hex) say which they must be.

    Raises TensorError for what can be no such place, size or digest.
    """

    key: str
    sha256: str
    size_bytes: PositiveQuantity

    def __post_init__(self) -> None:
        if not self.key:
            raise TensorError("a blob has no key")
        if not _SHA256.fullmatch(self.sha256):
            raise TensorError(
                f"blob {self.key[:200]}: sha256 is '{self.sha256[:80]}', expected 64 hex digits in lower case"
            )
        if self.size_bytes < 1:
            raise TensorError(f"blob {self.key[:200]}: size_bytes is {self.size_bytes}, expected at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """`data` holds `prod(shape)` elements of `datatype`, row-major, little-endian.

    BYTES elements are each a 4-byte little-endian length followed by that many bytes (Triton's binary tensor
    extension). With `blob` the elements lie there and `data` is empty. Raises TensorError when they do not agree.
    """

    name: str
    datatype: Datatype
    shape: tuple[Quantity, ...]
    data: bytes
    blob: Blob | None = None

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_RANK:
            raise TensorError(f"tensor '{self.name}': has {len(self.shape)} dimensions, expected at most {MAX_RANK}")
        if any(d < 0 for d in self.shape):
            raise TensorError(f"tensor '{self.name}': shape {list(self.shape)} has a negative dimension")
        if self.blob is not None:
            if self.data:
                raise TensorError(f"tensor '{self.name}': has both data and a blob")
            return
        count = math.prod(self.shape)
        if self.datatype == BYTES:
            found = sum(1 for _ in _split(self.name, self.data))
            if found != count:
                raise TensorError(
                    f"tensor '{self.name}': shape {list(self.shape)} needs {count} BYTES elements, found {found}"
                )
            return
        size = ELEMENT_SIZE_BYTES.get(self.datatype)
        if size is None:
            expected = ", ".join([*ELEMENT_SIZE_BYTES, BYTES])
            raise TensorError(f"tensor '{self.name}': datatype '{self.datatype}' is not one of {expected}")
        if len(self.data) != count * size:
            raise TensorError(
                f"tensor '{self.name}': shape {list(self.shape)} of {self.datatype} needs {count * size} bytes, "
                f"found {len(self.data)}"
            )

    @property
    def item_count(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def elements(self) -> list[bytes]:
        """The elements of a BYTES tensor, in row-major order. Raises TensorError for any other datatype."""
        if self.datatype != BYTES:
            raise TensorError(f"tensor '{self.name}': has datatype {self.datatype}, expected BYTES")
        return list(_split(self.name, self.data))


def bytes_tensor(name: str, elements: Iterable[bytes]) -> Tensor:
    """A one-dimensional BYTES tensor of these elements."""
    parts = list(elements)
    data = b"".join(struct.pack("<I", len(e)) + e for e in parts)
    return Tensor(name=name, datatype=BYTES, shape=(len(parts),), data=data)


def _split(name: str, data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            raise TensorError(f"tensor '{name}': a BYTES element's 4-byte length is cut off at byte {at}")
        (size,) = struct.unpack_from("<I", data, at)
        at += 4
        if at + size > len(data):
            raise TensorError(f"tensor '{name}': a BYTES element of {size} bytes runs past the end at byte {at}")
        yield data[at : at + size]
        at += size
