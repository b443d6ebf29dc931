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


class Store:
    """One bucket. Every call ends within the client's timeouts and retries (about `3 x 30 s`)."""

    def __init__(self, settings: S3Settings) -> None:
        self.bucket = settings.bucket
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=settings.endpoint or None,
            aws_access_key_id=settings.access_key,
            aws_secret_access_key=settings.secret_key,
            region_name="us-east-1",
            config=Config(
                connect_timeout=30,  # also bounds each send of a body, so it cannot be short
                read_timeout=30,
                retries={"total_max_attempts": 3, "mode": "standard"},
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
