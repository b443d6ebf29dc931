"""How S3 is reached: objects are put once and read back verified. Blocking; call it off the event loop.

Keys are content addresses, so an object never changes: a second put of the same key is refused by the server and means
that the object is already there.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError
from urllib3.exceptions import HTTPError

from infra.settings import S3Settings

_CHUNK_BYTES = 1024 * 1024
# What a store answers that has no rules for the life of objects, or lets nobody set them.
_REFUSALS = ("NotImplemented", "MethodNotAllowed", "AccessDenied")


class StoreUnavailable(RuntimeError):
    """S3 did not answer, or answered with a server error; the same call may succeed later."""


class KeyRefused(ValueError):
    """No store would be asked for this key: it is not one."""


class ObjectMissing(LookupError):
    """There is no object under this key."""


class DigestMismatch(RuntimeError):
    """The bytes received are not the ones the digest names; nothing was kept."""


class RuleDiffers(RuntimeError):
    """A rule of the bucket is not the one that is declared; the message is what it says instead."""


class RuleRefused(RuntimeError):
    """The store does not take rules for the life of objects."""


class Store:
    """One bucket. Connecting and each wait for the store take `timeout_s` at most, and there are `attempts`.

    A small object has arrived `attempts x timeout_s` after the call, and one wait more, or StoreUnavailable is raised;
    `get_verified`, for files of any size, goes on as long as bytes keep coming. KeyRefused for what cannot be a key.
    """

    def __init__(
        self,
        settings: S3Settings,
        *,
        timeout_s: float = 30,
        attempts: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bucket = settings.bucket
        self._body_within_s = attempts * timeout_s
        self._clock = clock
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=settings.endpoint or None,
            aws_access_key_id=settings.access_key,
            aws_secret_access_key=settings.secret_key,
            region_name="us-east-1",
            config=Config(
                connect_timeout=timeout_s,  # also bounds each send of a body, so it cannot be short
                read_timeout=timeout_s,
                retries={"total_max_attempts": attempts, "mode": "standard"},
                s3={"addressing_style": "path"},
            ),
        )

    def create_bucket(self) -> bool:
        """Create the bucket; False when it exists."""
        try:
            self._client.create_bucket(Bucket=self.bucket)
        except ClientError as error:
            if _code(error) in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                return False
            raise StoreUnavailable(f"bucket {self.bucket}: {error}") from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"bucket {self.bucket}: {error}") from error
        return True

    def expire(self, prefix: str, *, after_days: int) -> bool:
        """Let objects under a prefix go some days after they were put; False when this is so already.

        Raises RuleDiffers when there is another rule for the prefix, which is left as it is; RuleRefused when this
        store has no such rules or lets nobody set them; StoreUnavailable.
        """
        found = self._rules()
        if _has_rule(found, prefix, after_days):
            return False
        wanted = {
            "ID": f"inferlog-{prefix.strip('/')}",
            "Filter": {"Prefix": prefix},
            "Status": "Enabled",
            "Expiration": {"Days": after_days},
        }
        try:
            self._client.put_bucket_lifecycle_configuration(
                Bucket=self.bucket, LifecycleConfiguration={"Rules": [*found, wanted]}
            )
        except (ClientError, BotoCoreError) as error:
            raise self._rule_error(error) from error
        return True

    def expires(self, prefix: str, *, after_days: int) -> bool:
        """Whether `expire` would find nothing to do; changes nothing. Raises the same."""
        return _has_rule(self._rules(), prefix, after_days)

    def _rules(self) -> list[Any]:
        try:
            return list(self._client.get_bucket_lifecycle_configuration(Bucket=self.bucket)["Rules"])
        except ClientError as error:
            if _code(error) == "NoSuchLifecycleConfiguration":
                return []
            raise self._rule_error(error) from error
        except BotoCoreError as error:
            raise self._rule_error(error) from error

    def _rule_error(self, error: Exception) -> Exception:
        if isinstance(error, ClientError) and _code(error) in _REFUSALS:
            return RuleRefused(f"{self.bucket}: {error}")
        return StoreUnavailable(f"bucket {self.bucket}: {error}")

    def bucket_exists(self) -> bool:
        """Whether the bucket is there. Raises StoreUnavailable."""
        try:
            self._client.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            if _code(error) in ("NoSuchBucket", "404"):
                return False
            raise StoreUnavailable(f"bucket {self.bucket}: {error}") from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"bucket {self.bucket}: {error}") from error
        return True

    def put_once(self, key: str, data: bytes) -> bool:
        """Store an object that is not there yet; False when it is, and then it is left as it is."""
        try:
            self._client.put_object(Bucket=self.bucket, Key=key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            if _code(error) in ("PreconditionFailed", "412"):
                return False
            raise StoreUnavailable(f"put {key}: {error}") from error
        except BotoCoreError as error:
            raise _failed("put", key, error) from error
        return True

    def get(self, key: str) -> bytes:
        """A small object whole. Raises ObjectMissing, StoreUnavailable."""
        return b"".join(self._chunks(key, ends_s=self._clock() + self._body_within_s))

    def get_at_most(self, key: str, size_bytes: int) -> bytes:
        """An object of up to `size_bytes` whole; of a larger one a byte more than that.

        Raises ObjectMissing, StoreUnavailable.
        """
        return b"".join(self._chunks(key, ends_s=self._clock() + self._body_within_s, most_bytes=size_bytes + 1))

    def get_verified(self, key: str, target: Path, *, sha256: str) -> None:
        """Download to `target`, which appears whole and with this digest or not at all (temporary file, then rename).

        Raises ObjectMissing, StoreUnavailable, DigestMismatch.
        """
        part = target.with_name(f"{target.name}.{threading.get_ident()}.part")
        digest = hashlib.sha256()
        try:
            with part.open("wb") as out:
                for chunk in self._chunks(key):
                    digest.update(chunk)
                    out.write(chunk)
            if digest.hexdigest() != sha256:
                raise DigestMismatch(f"{key}: expected sha256 {sha256}, found {digest.hexdigest()}")
            part.replace(target)
        except OSError as error:
            raise StoreUnavailable(f"get {key}: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    def _chunks(self, key: str, *, ends_s: float | None = None, most_bytes: int | None = None) -> Iterator[bytes]:
        """The object as it arrives, up to `most_bytes`. What ends before its length was reached has not arrived: a
        connection that breaks and an object that is short look alike otherwise."""
        try:
            answer = self._client.get_object(Bucket=self.bucket, Key=key)
            length: int = answer["ContentLength"]
            wanted = length if most_bytes is None else min(length, most_bytes)
            with answer["Body"] as raw:
                found = 0
                while found < wanted:
                    # What has come, not all of it: else a body that drips would hold the call for as long as it likes.
                    chunk: bytes = raw.read1(min(_CHUNK_BYTES, wanted - found))
                    if not chunk:
                        raise StoreUnavailable(f"get {key}: the answer ended after {found} of {length} bytes")
                    found += len(chunk)
                    yield chunk
                    if found < wanted and ends_s is not None and self._clock() > ends_s:
                        raise StoreUnavailable(f"get {key}: {found} of {length} bytes in {self._body_within_s:g} s")
                if found == length:
                    raw.read()  # nothing; and the connection is free for the next call
        except ClientError as error:
            raise self._translate(key, error) from error
        except (BotoCoreError, HTTPError, OSError) as error:
            raise _failed("get", key, error) from error

    def _translate(self, key: str, error: ClientError) -> Exception:
        if _code(error) in ("NoSuchKey", "404", "NoSuchBucket"):
            return ObjectMissing(f"s3://{self.bucket}/{key} does not exist")
        return StoreUnavailable(f"get {key}: {error}")


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _failed(what: str, key: str, error: Exception) -> Exception:
    if isinstance(error, ParamValidationError):  # said by the client, which asked nobody
        return KeyRefused(f"{what} '{key}': {error}")
    return StoreUnavailable(f"{what} {key}: {error}")


def _has_rule(rules: list[Any], prefix: str, after_days: int) -> bool:
    """Whether there is such a rule. Raises RuleDiffers when there is another one for the prefix."""
    for rule in rules:
        if rule.get("Filter", {}).get("Prefix", rule.get("Prefix")) == prefix:
            found = (rule.get("Expiration", {}).get("Days"), rule.get("Status"))
            if found != (after_days, "Enabled"):
                raise RuleDiffers(f"{found[0]} ({found[1]})")
            return True
    return False
