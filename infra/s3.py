"""How S3 is reached: objects are put once and read back verified. Blocking; call it off the event loop.

Keys are content addresses, so an object never changes: a second put of the same key is refused by the server and means
that the object is already there.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.settings import S3Settings


class StoreUnavailable(RuntimeError):
    """S3 did not answer, or answered with a server error; the same call may succeed later."""


class ObjectMissing(LookupError):
    """There is no object under this key."""


class DigestMismatch(RuntimeError):
    """The bytes received are not the ones the digest names; nothing was kept."""


class RuleDiffers(RuntimeError):
    """A rule of the bucket is not the one that is declared; the message is what it says instead."""


class RuleRefused(RuntimeError):
    """The store does not take rules for the life of objects."""


class Store:
    """One bucket. Every call ends within the client's timeouts and retries (about `attempts x timeout_s`)."""

    def __init__(self, settings: S3Settings, *, timeout_s: float = 30, attempts: int = 3) -> None:
        self.bucket = settings.bucket
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
        wanted = {
            "ID": f"inferlog-{prefix.strip('/')}",
            "Filter": {"Prefix": prefix},
            "Status": "Enabled",
            "Expiration": {"Days": after_days},
        }
        rules = self._rules()
        for rule in rules:
            if rule.get("Filter", {}).get("Prefix", rule.get("Prefix")) == prefix:
                found = (rule.get("Expiration", {}).get("Days"), rule.get("Status"))
                if found != (after_days, "Enabled"):
                    raise RuleDiffers(f"{found[0]} ({found[1]})")
                return False
        try:
            self._client.put_bucket_lifecycle_configuration(
                Bucket=self.bucket, LifecycleConfiguration={"Rules": [*rules, wanted]}
            )
        except ClientError as error:
            raise RuleRefused(f"{self.bucket}: {error}") from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"bucket {self.bucket}: {error}") from error
        return True

    def _rules(self) -> list[Any]:
        try:
            return list(self._client.get_bucket_lifecycle_configuration(Bucket=self.bucket)["Rules"])
        except ClientError as error:
            if _code(error) == "NoSuchLifecycleConfiguration":
                return []
            raise RuleRefused(f"{self.bucket}: {error}") from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"bucket {self.bucket}: {error}") from error

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
            raise StoreUnavailable(f"put {key}: {error}") from error
        return True

    def get(self, key: str) -> bytes:
        """A small object whole. Raises ObjectMissing, StoreUnavailable."""
        try:
            body: bytes = self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        except ClientError as error:
            raise self._translate(key, error) from error
        except (BotoCoreError, OSError) as error:
            raise StoreUnavailable(f"get {key}: {error}") from error
        return body

    def get_at_most(self, key: str, size_bytes: int) -> bytes:
        """An object of up to `size_bytes` whole; of a larger one a byte more than that.

        Raises ObjectMissing, StoreUnavailable.
        """
        try:
            with self._client.get_object(Bucket=self.bucket, Key=key)["Body"] as body:
                data: bytes = body.read(size_bytes + 1)
        except ClientError as error:
            raise self._translate(key, error) from error
        except (BotoCoreError, OSError) as error:
            raise StoreUnavailable(f"get {key}: {error}") from error
        return data

    def get_verified(self, key: str, target: Path, *, sha256: str) -> None:
        """Download to `target`, which appears whole and with this digest or not at all (temporary file, then rename).

        Raises ObjectMissing, StoreUnavailable, DigestMismatch.
        """
        part = target.with_name(f"{target.name}.{threading.get_ident()}.part")
        digest = hashlib.sha256()
        try:
            body = self._client.get_object(Bucket=self.bucket, Key=key)["Body"]
            with part.open("wb") as out:
                for chunk in body.iter_chunks(1024 * 1024):
                    digest.update(chunk)
                    out.write(chunk)
            if digest.hexdigest() != sha256:
                raise DigestMismatch(f"{key}: expected sha256 {sha256}, found {digest.hexdigest()}")
            part.replace(target)
        except ClientError as error:
            raise self._translate(key, error) from error
        except (BotoCoreError, OSError) as error:
            raise StoreUnavailable(f"get {key}: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    def _translate(self, key: str, error: ClientError) -> Exception:
        if _code(error) in ("NoSuchKey", "404", "NoSuchBucket"):
            return ObjectMissing(f"s3://{self.bucket}/{key} does not exist")
        return StoreUnavailable(f"get {key}: {error}")


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
