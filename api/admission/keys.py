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
from typing import Protocol, TypeVar

from api.admission.caller import Caller
from api.errors import Unauthorized, Unavailable

T = TypeVar("T")

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_SECRET_BITS = 256
_SECRET_CHARS = 43  # 62**43 > 2**256
_KEY = re.compile(r"il_([a-z0-9]{1,12})_([0-9a-z]{12})_([0-9A-Za-z]{43})([0-9a-f]{8})")

FRESH_S = 5.0
STALE_S = 30.0
_UNKNOWN_FRESH_S = 1.0
_AWAY_PAUSE_S = 0.5
_MAX_KNOWN = 20_000
_MAX_UNKNOWN = 1_000
# Fewer than the pool has connections, so that known keys and routes always find one.
_STRANGERS_AT_ONCE = 2
# Room for the first calls after a start, when every key is new; and no longer than a caller should wait to hear no.
_STRANGERS_WAITING = 64
_STRANGER_WAITS_S = 0.5

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    record: KeyRecord
    fetched_s: float


class Keys:
    """The callers known to this process.

    Anyone can make up ids that look like ours, so ids that are not known share nothing with known ones: they have a
    small memory of their own, few look-ups at a time, and their failures hold up nobody else.
    """

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
        self._known: dict[str, _Entry] = {}
        self._unknown: dict[str, float] = {}
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._strangers = 0
        self._turns = asyncio.Semaphore(_STRANGERS_AT_ONCE)
        # Monotonic times until which Postgres is not asked, for known ids and for others.
        self._away_until_s = {True: float("-inf"), False: float("-inf")}

    async def identify(self, authorization: str | None, *, fresh_s: float = FRESH_S) -> Caller:
        """The caller of this Authorization header.

        `fresh_s` is how old an earlier lookup may be. Raises Unauthorized, or Unavailable when Postgres is away
        and the key was not seen in the last 30 s, or when too many unknown keys are being looked up.
        """
        key = bearer(authorization)
        key_id = key_id_of(key, self._environment)
        record = await self._record(key_id, fresh_s)
        # The digests are compared even for an unknown id, in constant time: an answer's delay tells nothing.
        expected = record.secret_sha256 if record else bytes(32)
        if not hmac.compare_digest(digest(key), expected) or record is None:
            raise Unauthorized("unknown key")
        if record.revoked:
            raise Unauthorized("this key was revoked", code="revoked_api_key")
        if record.expires_at is not None and record.expires_at <= self._now():
            raise Unauthorized("this key has expired", code="expired_api_key")
        return record.caller

    async def _record(self, key_id: str, fresh_s: float) -> KeyRecord | None:
        """The stored key, None when there is none with this id."""
        entry = self._known.get(key_id)
        if entry is not None and self._clock() - entry.fetched_s <= fresh_s:
            return entry.record
        if entry is None and self._is_unknown(key_id):
            return None
        known = entry is not None
        if self._clock() >= self._away_until_s[known]:
            try:
                await self._looked_up(key_id, known=known)
            except KeySourceAway:
                # One caller in a while finds out; the others do not queue behind a server that hangs.
                self._away_until_s[known] = self._clock() + _AWAY_PAUSE_S
        entry = self._known.get(key_id)
        if entry is not None and self._clock() - entry.fetched_s <= STALE_S:
            return entry.record
        if entry is None and self._is_unknown(key_id):
            return None
        raise Unavailable("keys cannot be checked now: the model registry does not answer", code="registry_away")

    def _is_unknown(self, key_id: str) -> bool:
        fetched_s = self._unknown.get(key_id)
        return fetched_s is not None and self._clock() - fetched_s <= _UNKNOWN_FRESH_S

    def _looked_up(self, key_id: str, *, known: bool) -> Awaitable[None]:
        # One lookup per id at a time, however many calls wait for it; a caller that leaves does not end it.
        task = self._lookups.get(key_id)
        if task is None:
            if not known and self._strangers >= _STRANGERS_AT_ONCE + _STRANGERS_WAITING:
                raise _crowded()
            task = asyncio.ensure_future(self._look_up(key_id) if known else self._look_up_stranger(key_id))
            self._strangers += not known
            self._lookups[key_id] = task
            task.add_done_callback(lambda t: self._looked(key_id, t, known=known))
        return asyncio.shield(task)

    def _looked(self, key_id: str, task: asyncio.Task[None], *, known: bool) -> None:
        del self._lookups[key_id]
        self._strangers -= not known
        if not task.cancelled():
            task.exception()  # seen here even when every caller has left

    async def _look_up_stranger(self, key_id: str) -> None:
        try:
            await asyncio.wait_for(self._turns.acquire(), _STRANGER_WAITS_S)
        except asyncio.TimeoutError:
            raise _crowded() from None
        try:
            await self._look_up(key_id)
        finally:
            self._turns.release()

    async def _look_up(self, key_id: str) -> None:
        record = await self._source.find(key_id)
        self._known.pop(key_id, None)
        self._unknown.pop(key_id, None)
        if record is None:
            _put(self._unknown, key_id, self._clock(), at_most=_MAX_UNKNOWN)
        else:
            _put(self._known, key_id, _Entry(record=record, fetched_s=self._clock()), at_most=_MAX_KNOWN)


def _put(entries: dict[str, T], key_id: str, value: T, *, at_most: int) -> None:
    """Remember under a key that is not there yet; the entry that was put first makes room."""
    if len(entries) >= at_most:
        del entries[next(iter(entries))]
    entries[key_id] = value


def _crowded() -> Unavailable:
    return Unavailable("too many keys that were not seen here before are being checked now", code="keys_busy")
