"""A stand-in for S3 as the claim check sees it: a dict, switches for "away" and "breaks off", a gate for "slow"."""

from __future__ import annotations

import threading

from infra.blobs import ClaimCheck
from infra.s3 import ObjectMissing, StoreUnavailable
from schemas.tensors import Tensor

#: Beyond what `claim_check` lets a record carry.
LARGE = Tensor(name="large", datatype="UINT8", shape=(1, 2000), data=b"\x01" * 2000)


class FakeBlobStore:
    """Implements BlobStore. `calls` lists what was asked, also while it is away; `open` holds calls while cleared; the
    next `breaks_off` answers end half way."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.away = False
        self.breaks_off = 0
        self.open = threading.Event()
        self.open.set()
        self.calls: list[str] = []

    def put_once(self, key: str, data: bytes) -> bool:
        self._called("put")
        return self.objects.setdefault(key, data) is data

    def get_at_most(self, key: str, size_bytes: int) -> bytes:
        self._called("get")
        if key not in self.objects:
            raise ObjectMissing(f"s3://fake/{key} does not exist")
        data = self.objects[key][: size_bytes + 1]
        if self.breaks_off:
            self.breaks_off -= 1
            raise StoreUnavailable(f"get {key}: the answer ended after {len(data) // 2} of {len(data)} bytes")
        return data

    def _called(self, what: str) -> None:
        self.calls.append(what)
        self.open.wait(10)
        if self.away:
            raise StoreUnavailable("switched off")


def claim_check(store: FakeBlobStore | None = None, *, inline_bytes: int = 1000, patience_s: float = 5.0) -> ClaimCheck:
    """A claim check over a stand-in."""
    return ClaimCheck(store or FakeBlobStore(), inline_bytes=inline_bytes, patience_s=patience_s)
