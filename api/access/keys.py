"""The callers known to this process, by their keys.

A key is looked up in Postgres when it is first seen, and again only after it has changed: the feed (`key_feed`) says
when, twice a second. While Postgres is away, what was true within the last 30 s goes on working, and then nothing does.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol, TypeVar

from api.access.key_record import KeyRecord, caller_of
from api.access.key_shape import bearer, digest, key_id_of
from api.admission.caller import Caller
from api.errors import Unauthorized, Unavailable

T = TypeVar("T")

#: How long what is known of a key counts without asking, and how long when nobody answers. The feed says twice a
#: second that it is still true; a process that was stopped meanwhile asks.
FRESH_S = 1.0
STALE_S = 30.0
_UNKNOWN_FRESH_S = 1.0
_AWAY_PAUSE_S = 0.5
#: Some 330 bytes each, 450 when each is of another customer.
_MAX_KNOWN = 100_000
_MAX_UNKNOWN = 1_000
#: Callers that are ready made, some 1.2 kB each.
_MAX_CALLERS = 8_192
#: Customers whose changes are remembered one by one.
_MAX_CHANGED = 20_000
#: A key whose changes come faster than it can be looked up is looked up again at its next call.
_LOOKUP_TRIES = 3
# Fewer than the pool has connections, so that known keys and routes always find one.
_STRANGERS_AT_ONCE = 2
# Room for the first calls after a start, when every key is new; and no longer than a caller should wait to hear no.
_STRANGERS_WAITING = 64
_STRANGER_WAITS_S = 0.5


class KeySourceAway(RuntimeError):
    """The place where keys are stored did not answer."""


class KeySource(Protocol):
    """Where keys are stored."""

    async def find(self, key_id: str) -> KeyRecord | None:
        """The key with this id, None when there is none. Raises KeySourceAway."""


@dataclass(slots=True)
class _Entry:
    """What is known of a key since `asked_s`; `era` is how often changes had been told when it was asked, and _CHANGED
    once the key itself has changed."""

    record: KeyRecord
    asked_s: float
    era: int


_CHANGED = -1


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
        self._callers: dict[str, tuple[KeyRecord, Caller]] = {}
        self._lookups: dict[str, asyncio.Task[None]] = {}
        self._changed_meanwhile: set[str] = set()
        # How often changes have been told, at which of those times which customer had changed, and at which everything.
        self._era = 0
        self._customers: dict[str, int] = {}
        self._all_era = 0
        # What was not told to have changed was true then.
        self._current_s = float("-inf")
        self._strangers = 0
        self._turns = asyncio.Semaphore(_STRANGERS_AT_ONCE)
        # Monotonic times until which Postgres is not asked, for known ids and for others.
        self._away_until_s = {True: float("-inf"), False: float("-inf")}

    async def identify(self, authorization: str | None) -> Caller:
        """The caller of this Authorization header.

        Raises Unauthorized, or Unavailable when Postgres is away and what is known was true more than 30 s ago, or
        when too many unknown keys are being looked up.
        """
        key = bearer(authorization)
        key_id = key_id_of(key, self._environment)
        record = await self._record(key_id)
        # The digests are compared even for an unknown id, in constant time: an answer's delay tells nothing.
        expected = record.secret_sha256 if record else bytes(32)
        if not hmac.compare_digest(digest(key), expected) or record is None:
            raise Unauthorized("unknown key")
        if record.revoked:
            raise Unauthorized("this key was revoked", code="revoked_api_key")
        if record.expires_at is not None and record.expires_at <= self._now():
            raise Unauthorized("this key has expired", code="expired_api_key")
        return self._caller(record)

    def _caller(self, record: KeyRecord) -> Caller:
        """The same object for as long as the key stays as it is and is used."""
        made = self._callers.pop(record.key_id, None)
        if made is None or made[0] is not record:
            made = (record, caller_of(record))
        _put(self._callers, record.key_id, made, at_most=_MAX_CALLERS)
        return made[1]

    # -- what the feed says -------------------------------------------------------------------------------------------

    def current(self, *, as_of_s: float) -> None:
        """Every change up to then has been told (monotonic time)."""
        self._current_s = as_of_s

    def changed(self, key_ids: Collection[str], customer_ids: Collection[str]) -> None:
        """These keys, and all keys of these customers, are looked up before they count again."""
        if not key_ids and not customer_ids:
            return
        self._era += 1
        for key_id in key_ids:
            self._unknown.pop(key_id, None)
            if (entry := self._known.get(key_id)) is not None:
                entry.era = _CHANGED
        # An answer that is on its way may be from before the change.
        self._changed_meanwhile.update(self._lookups.keys() & set(key_ids))
        self._customers.update(dict.fromkeys(customer_ids, self._era))
        if len(self._customers) > _MAX_CHANGED:
            self.all_changed()

    def all_changed(self) -> None:
        """Anything may have changed: every key is looked up before it counts again."""
        self._era += 1
        self._all_era = self._era
        self._customers.clear()
        self._unknown.clear()

    # -- what is known, and what is looked up -------------------------------------------------------------------------

    async def _record(self, key_id: str) -> KeyRecord | None:
        """The stored key, None when there is none with this id."""
        entry = self._known.get(key_id)
        if entry is not None and self._age_s(entry) <= FRESH_S:
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
        if entry is not None and self._age_s(entry) <= STALE_S:
            return entry.record
        if entry is None and self._is_unknown(key_id):
            return None
        raise Unavailable("keys cannot be checked now: the model registry does not answer", code="registry_away")

    def _age_s(self, entry: _Entry) -> float:
        """For how long nobody has said that this is still true."""
        return float("inf") if self._has_changed(entry) else self._clock() - max(entry.asked_s, self._current_s)

    def _has_changed(self, entry: _Entry) -> bool:
        return entry.era < max(self._all_era, self._customers.get(entry.record.customer.customer_id, 0))

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
        self._changed_meanwhile.discard(key_id)
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
        for _ in range(_LOOKUP_TRIES):
            self._changed_meanwhile.discard(key_id)
            asked_s, era = self._clock(), self._era
            record = await self._source.find(key_id)
            if key_id in self._changed_meanwhile:
                era = _CHANGED
            entry = None if record is None else _Entry(record=record, asked_s=asked_s, era=era)
            if era >= self._all_era and (entry is None or not self._has_changed(entry)):
                break
        self._known.pop(key_id, None)
        self._unknown.pop(key_id, None)
        if entry is None:
            _put(self._unknown, key_id, asked_s, at_most=_MAX_UNKNOWN)
        else:
            # By the record's own text, so that the id is in memory once.
            _put(self._known, entry.record.key_id, entry, at_most=_MAX_KNOWN)


def _put(entries: dict[str, T], key_id: str, value: T, *, at_most: int) -> None:
    """Remember under a key that is not there yet; the entry that was put first makes room."""
    if len(entries) >= at_most:
        del entries[next(iter(entries))]
    entries[key_id] = value


def _crowded() -> Unavailable:
    return Unavailable("too many keys that were not seen here before are being checked now", code="keys_busy")
