"""Who calls: the shape of an API key, and the callers known to this process.

A key is looked up in Postgres at most every 5 s; its revocation does not wait for that, because the limiter reads the
revoked set in the call that takes a token. While Postgres is away, keys seen in the last 30 s go on working.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

from api.admission.limits import Limit
from api.errors import Unauthorized, Unavailable

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_SECRET_BITS = 256
_SECRET_CHARS = 43  # 62**43 > 2**256
_KEY = re.compile(r"il_([a-z0-9]{1,12})_([0-9a-z]{12})_([0-9A-Za-z]{43})([0-9a-f]{8})")

FRESH_S = 5.0
STALE_S = 30.0
_UNKNOWN_FRESH_S = 1.0
_AWAY_PAUSE_S = 0.5
_MAX_ENTRIES = 20_000

HOW = "send the header 'Authorization: Bearer <your key>'"


@dataclass(frozen=True, slots=True, kw_only=True)
class MintedKey:
    """A new key: `secret` is the whole key and shown once, `secret_sha256` is what is stored."""

    key_id: str
    secret: str
    secret_sha256: bytes


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def digest(key: str) -> bytes:
    """What is stored of a key. A plain SHA-256 is enough, because a key holds 256 random bits."""
    return hashlib.sha256(key.encode()).digest()


def mint(environment: str) -> MintedKey:
    """A new random key `il_<env>_<id>_<secret><checksum>`."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(12))
    number = secrets.randbits(_SECRET_BITS)
    chars = []
    for _ in range(_SECRET_CHARS):
        number, at = divmod(number, 62)
        chars.append(_BASE62[at])
    start = f"il_{environment}_{key_id}_{''.join(chars)}"
    key = start + _checksum(start)
    return MintedKey(key_id=key_id, secret=key, secret_sha256=digest(key))


def key_id_of(key: str, environment: str) -> str:
    """The public id inside a key. Raises Unauthorized, without any lookup, for what cannot be one of our keys."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise Unauthorized("this is not an inferlog key; expected il_<environment>_<id>_<secret>")
    if _checksum(key[:-8]) != match[4]:
        raise Unauthorized("the key's checksum does not fit: a character was lost or changed")
    if match[1] != environment:
        raise Unauthorized(f"the key belongs to environment '{match[1]}', this is '{environment}'")
    return match[2]


def bearer(authorization: str | None) -> str:
    """The key in an Authorization header. Raises Unauthorized when there is none."""
    if authorization is None:
        raise Unauthorized(f"no key; {HOW}")
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise Unauthorized(f"the Authorization header holds no bearer key; {HOW}")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, and the limits that hold for the call: the key's, then the customer's."""

    customer_id: str
    key_id: str
    limits: tuple[Limit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A key as stored."""

    caller: Caller
    secret_sha256: bytes
    expires_at: datetime | None
    revoked: bool


class KeySourceAway(RuntimeError):
    """The place where keys are stored did not answer."""


class KeySource(Protocol):
    """Where keys are stored."""

    async def find(self, key_id: str) -> KeyRecord | None:
        """The key with this id, None when there is none. Raises KeySourceAway."""


@dataclass(slots=True)
class _Entry:
    record: KeyRecord | None
    fetched_s: float


class Keys:
    """The callers known to this process. At most `_MAX_ENTRIES` ids are remembered, known and unknown ones together."""

    def __init__(
        self,
        source: KeySource,
        *,
        environment: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._source = source
        self._environment = environment
        self._clock = clock
        self._now = now
        self._entries: dict[str, _Entry] = {}
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._away_until_s = float("-inf")

    async def identify(self, authorization: str | None, *, fresh_s: float = FRESH_S) -> Caller:
        """The caller of this Authorization header.

        `fresh_s` is how old an earlier lookup may be. Raises Unauthorized, or Unavailable when Postgres is away
        and the key was not seen in the last 30 s.
        """
        key = bearer(authorization)
        key_id = key_id_of(key, self._environment)
        entry = self._entries.get(key_id)
        if entry is None or self._clock() - entry.fetched_s > (fresh_s if entry.record else _UNKNOWN_FRESH_S):
            entry = await self._refresh(key_id)
        record = entry.record
        # The digests are compared even for an unknown id, in constant time: an answer's delay tells nothing.
        expected = record.secret_sha256 if record else bytes(32)
        if not hmac.compare_digest(digest(key), expected) or record is None:
            raise Unauthorized("unknown key")
        if record.revoked:
            raise Unauthorized("this key was revoked", code="revoked_api_key")
        if record.expires_at is not None and record.expires_at <= self._now():
            raise Unauthorized("this key has expired", code="expired_api_key")
        return record.caller

    async def _refresh(self, key_id: str) -> _Entry:
        if self._clock() >= self._away_until_s:
            try:
                await self._looked_up(key_id)
            except KeySourceAway:
                # One caller in a while finds out; the others do not queue behind a server that hangs.
                self._away_until_s = self._clock() + _AWAY_PAUSE_S
        entry = self._entries.get(key_id)
        if entry is not None and self._clock() - entry.fetched_s <= STALE_S:
            return entry
        raise Unavailable("keys cannot be checked now: the model registry does not answer", code="registry_away")

    def _looked_up(self, key_id: str) -> Awaitable[None]:
        # One lookup per id at a time, however many calls wait for it; a caller that leaves does not end it.
        task = self._lookups.get(key_id)
        if task is None:
            task = asyncio.ensure_future(self._look_up(key_id))
            self._lookups[key_id] = task
            task.add_done_callback(lambda t: self._forget(key_id, t))
        return asyncio.shield(task)

    def _forget(self, key_id: str, task: asyncio.Task[None]) -> None:
        del self._lookups[key_id]
        if not task.cancelled():
            task.exception()  # seen here even when every caller has left

    async def _look_up(self, key_id: str) -> None:
        record = await self._source.find(key_id)
        self._entries.pop(key_id, None)
        if len(self._entries) >= _MAX_ENTRIES:
            del self._entries[next(iter(self._entries))]
        self._entries[key_id] = _Entry(record=record, fetched_s=self._clock())
