"""What is made of S3's answers: which of them are outages, refusals, or nothing at all."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.response import StreamingBody
from urllib3.exceptions import ReadTimeoutError

from infra.s3 import KeyRefused, ObjectMissing, RuleDiffers, RuleRefused, Store, StoreUnavailable
from infra.settings import S3Settings

SETTINGS = S3Settings(endpoint="http://127.0.0.1:9", bucket="b", access_key="k", secret_key="s")
DATA = bytes(range(200)) * 5


class Raw(io.BytesIO):
    """A body that comes `step` bytes at a time; `fails` when no more would."""

    def __init__(self, data: bytes, *, step: int = 10_000, fails: Exception | None = None) -> None:
        super().__init__(data)
        self.step = step
        self.fails = fails
        self.reads = 0

    def read1(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        found = super().read1(min(self.step, size or 0))
        if not found and self.fails is not None:
            raise self.fails
        return found


class Client:
    """S3 by its answers: an object, or errors by the name of the call."""

    def __init__(self, raw: Raw | None = None, length: int = len(DATA), **codes: str) -> None:
        self.raw = raw
        self.length = length
        self.codes = codes
        self.rules: list[Any] = []

    def get_object(self, **_: Any) -> dict[str, Any]:
        self._maybe_fail("get_object")
        assert self.raw is not None
        return {"ContentLength": self.length, "Body": StreamingBody(self.raw, self.length)}

    def get_bucket_lifecycle_configuration(self, **_: Any) -> dict[str, Any]:
        self._maybe_fail("get_rules")
        return {"Rules": self.rules}

    def put_bucket_lifecycle_configuration(self, **settings: Any) -> None:
        self._maybe_fail("put_rules")
        self.rules = settings["LifecycleConfiguration"]["Rules"]

    def _maybe_fail(self, call: str) -> None:
        if call in self.codes:
            raise ClientError({"Error": {"Code": self.codes[call], "Message": "said"}}, call)


def store(client: Client, **settings: Any) -> Store:
    made = Store(SETTINGS, **settings)
    made._client = client
    return made


def test_an_object_comes_whole_and_of_a_longer_one_a_byte_more() -> None:
    for most, found in ((len(DATA) + 1, DATA), (len(DATA), DATA), (len(DATA) - 1, DATA), (500, DATA[:501])):
        assert store(Client(Raw(DATA, step=7))).get_at_most("k", most) == found
    assert store(Client(Raw(DATA))).get("k") == DATA
    assert store(Client(Raw(b""), length=0)).get("k") == b""


def test_an_answer_that_breaks_off_is_an_outage_and_not_other_bytes(tmp_path: Path) -> None:
    for fails in (None, ReadTimeoutError(None, "", "late"), ConnectionResetError("reset")):  # type: ignore[arg-type]
        half = [Raw(DATA[:500], fails=fails) for _ in range(3)]
        with pytest.raises(StoreUnavailable):
            store(Client(half[0])).get_at_most("k", len(DATA))
        with pytest.raises(StoreUnavailable):
            store(Client(half[1])).get("k")
        with pytest.raises(StoreUnavailable):
            store(Client(half[2])).get_verified("k", tmp_path / "x", sha256=hashlib.sha256(DATA).hexdigest())
        assert all(raw.closed for raw in half)
    assert list(tmp_path.iterdir()) == []


def test_a_body_that_drips_ends_with_the_calls_time() -> None:
    times = iter(range(1000))
    raw = Raw(DATA, step=1)
    with pytest.raises(StoreUnavailable, match=r"bytes in 20 s"):
        store(Client(raw), timeout_s=10, attempts=2, clock=lambda: next(times)).get_at_most("k", len(DATA))
    assert raw.reads < 30


def test_a_file_takes_as_long_as_bytes_keep_coming(tmp_path: Path) -> None:
    times = iter(range(10_000))
    dripping = store(Client(Raw(DATA, step=1)), timeout_s=1, attempts=1, clock=lambda: next(times))
    dripping.get_verified("k", tmp_path / "x", sha256=hashlib.sha256(DATA).hexdigest())
    assert (tmp_path / "x").read_bytes() == DATA


def test_what_cannot_be_a_key_is_not_the_stores_fault() -> None:
    real = Store(SETTINGS, attempts=1)  # its client says so before it asks anybody
    with pytest.raises(KeyRefused):
        real.get_at_most("", 10)
    with pytest.raises(KeyRefused):
        real.put_once("", b"")
    with pytest.raises(ObjectMissing):
        store(Client(get_object="NoSuchKey")).get("k")


@pytest.mark.parametrize("call", ["get_rules", "put_rules"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("NotImplemented", RuleRefused),
        ("MethodNotAllowed", RuleRefused),
        ("AccessDenied", RuleRefused),
        ("SlowDown", StoreUnavailable),
        ("InternalError", StoreUnavailable),
        ("NoSuchBucket", StoreUnavailable),
        ("503", StoreUnavailable),
    ],
)
def test_only_a_store_that_says_so_takes_no_rules(call: str, code: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        store(Client(**{call: code})).expire("blobs/", after_days=3)


def test_looking_at_a_rule_sets_none() -> None:
    client = Client()
    assert not store(client).expires("blobs/", after_days=3)
    assert client.rules == []
    assert store(client).expire("blobs/", after_days=3)
    assert store(client).expires("blobs/", after_days=3)
    with pytest.raises(RuleDiffers, match="3"):
        store(client).expires("blobs/", after_days=4)
    assert not store(Client(get_rules="NoSuchLifecycleConfiguration")).expires("blobs/", after_days=3)
