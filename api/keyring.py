"""API keys as rows: created, rotated, revoked; each change and the fact of it are one transaction.

A fact describes the key after the change, never its secret nor anything made from it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

from api.admission.keys import MintedKey
from infra.actor import COMMAND_STAMP, Author
from infra.outbox import add_facts
from infra.postgres import Connection, queries
from schemas.facts import KeyChange, KeyChanged
from schemas.ids import new_event_id
from schemas.topics import KEYS


class NoSuchKey(LookupError):
    """There is no key with this id."""


class NotRotatable(ValueError):
    """The key cannot have a successor; the message says why and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as its row describes it, without what its secret is checked by. Rates in requests and requests per second;
    `expires_at` and `revoked_at` are None while it has no such moment."""

    key_id: str
    customer_id: str
    label: str
    requests_per_s: int
    burst: int
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    replaces_key_id: str | None = None


async def create_key(
    connection: Connection,
    minted: MintedKey,
    *,
    customer_id: str,
    label: str,
    requests_per_s: int,
    burst: int,
    lifetime: timedelta | None,
    by: Author,
) -> ApiKey:
    """A key of this customer, from now on and for `lifetime`; None: for good."""
    async with connection.transaction():
        now = await _now(connection)
        made = ApiKey(
            key_id=minted.key_id,
            customer_id=customer_id,
            label=label,
            requests_per_s=requests_per_s,
            burst=burst,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
        )
        await _insert(connection, made, minted)
        await _tell(connection, [(made, KeyChange.CREATED)], at=now, by=by)
    return made


async def rotate_key(
    connection: Connection, key_id: str, minted: MintedKey, *, overlap: timedelta, by: Author
) -> tuple[ApiKey, ApiKey]:
    """The key, which now ends after `overlap` unless it ends before, and its successor of the same label and limits.

    The successor lives as long as the key was given at first. Raises NoSuchKey, NotRotatable.
    """
    sql = queries("api")
    async with connection.transaction():
        old = await _locked(connection, key_id)
        now = await _now(connection)
        successor = await connection.fetchval(sql["successor"], key_id)
        if successor is not None:
            raise NotRotatable(f"key {key_id} was rotated before; rotate its successor {successor} instead")
        if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
            word = "is revoked" if old.revoked_at is not None else "has expired"
            raise NotRotatable(f"key {key_id} {word}; make a new one with  inferlog keys create {old.customer_id}")
        ends = now + overlap
        ending = replace(old, expires_at=ends if old.expires_at is None else min(old.expires_at, ends))
        lifetime = None if old.expires_at is None else old.expires_at - old.created_at
        made = replace(
            old,
            key_id=minted.key_id,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
            replaces_key_id=key_id,
        )
        await connection.execute(sql["expire_key"], key_id, ending.expires_at)
        await _insert(connection, made, minted)
        await _tell(connection, [(ending, KeyChange.ROTATED), (made, KeyChange.CREATED)], at=now, by=by)
    return ending, made


async def revoke_key(connection: Connection, key_id: str, *, by: Author) -> ApiKey:
    """The key, revoked now or before; a second time changes nothing and is no second fact. Raises NoSuchKey."""
    async with connection.transaction():
        found = await _locked(connection, key_id)
        if found.revoked_at is not None:
            return found
        now = await _now(connection)
        revoked = replace(found, revoked_at=now)
        await connection.execute(queries("api")["revoke_key"], key_id, now)
        await _tell(connection, [(revoked, KeyChange.REVOKED)], at=now, by=by)
    return revoked


async def _locked(connection: Connection, key_id: str) -> ApiKey:
    """The key's row, which nobody else changes until the transaction ends."""
    row = await connection.fetchrow(queries("api")["lock_key"], key_id)
    if row is None:
        raise NoSuchKey(f"there is no key with the id '{key_id}'; see  inferlog keys list")
    return ApiKey(**row)


async def _now(connection: Connection) -> datetime:
    """The server's time, asked for under the lock, so that the times of a key's facts follow their order."""
    now: datetime = await connection.fetchval(queries("api")["now"])
    return now


async def _insert(connection: Connection, key: ApiKey, minted: MintedKey) -> None:
    await connection.execute(
        queries("api")["insert_key"],
        key.key_id,
        key.customer_id,
        minted.secret_sha256,
        key.label,
        key.requests_per_s,
        key.burst,
        key.created_at,
        key.expires_at,
        key.replaces_key_id,
    )


async def _tell(connection: Connection, changes: list[tuple[ApiKey, KeyChange]], *, at: datetime, by: Author) -> None:
    facts = []
    for key, change in changes:
        described = asdict(key)
        del described["created_at"]
        fact = KeyChanged(
            event_id=new_event_id(), occurred_at=at, change=change, actor=by.actor, reason=by.reason, **described
        )
        facts.append((key.key_id, fact))
    await add_facts(connection, KEYS, facts, stamp=COMMAND_STAMP)
