"""API keys as rows: created, changed, rotated, revoked; each change and the fact of it are one transaction.

A fact describes the key after the change, never its secret nor anything made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

from api.access.key_shape import MintedKey
from api.operators.rates import read_limits, write_limits
from infra.actor import COMMAND_STAMP, Author
from infra.outbox import add_facts
from infra.postgres import Connection, queries
from schemas.facts import KeyChange, KeyChanged, RateLimit
from schemas.ids import new_event_id
from schemas.ranges import MOMENTS
from schemas.topics import KEYS


class NoSuchKey(LookupError):
    """There is no key with this id."""


class NotRotatable(ValueError):
    """The key cannot have a successor; the message says why and what to do instead."""


class NotChangeable(ValueError):
    """The key does not change any more, or not to this; the message says why and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as its rows describe it, without what its secret is checked by. Rates in requests and requests per second;
    `expires_at` and `revoked_at` are None while it has no such moment; without `models` or `operations` it may all."""

    key_id: str
    customer_id: str
    label: str
    requests_per_s: int
    burst: int
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    replaces_key_id: str | None = None
    models: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    limits: tuple[RateLimit, ...] = ()
    max_concurrent: int | None = None


async def create_key(
    connection: Connection,
    minted: MintedKey,
    *,
    customer_id: str,
    label: str,
    requests_per_s: int,
    burst: int,
    lifetime: timedelta | None,
    expires_at: datetime | None = None,
    models: tuple[str, ...] = (),
    operations: tuple[str, ...] = (),
    limits: tuple[RateLimit, ...] = (),
    max_concurrent: int | None = None,
    by: Author,
) -> ApiKey:
    """A key of this customer, from now on and for `lifetime` or up to `expires_at`; both None: for good.

    Raises NotChangeable for an end that is over.
    """
    async with connection.transaction():
        now = await _now(connection)
        if expires_at is not None and expires_at <= now:
            raise NotChangeable(f"--expires-at: {expires_at:%Y-%m-%dT%H:%M:%SZ} is over; expected a time to come")
        made = ApiKey(
            key_id=minted.key_id,
            customer_id=customer_id,
            label=label,
            requests_per_s=requests_per_s,
            burst=burst,
            created_at=now,
            expires_at=expires_at if lifetime is None else now + lifetime,
            models=models,
            operations=operations,
            limits=limits,
            max_concurrent=max_concurrent,
        )
        await _insert(connection, made, minted)
        await _tell(connection, [(made, KeyChange.CREATED)], at=now, by=by)
    return made


async def rotate_key(
    connection: Connection, key_id: str, minted: MintedKey, *, overlap: timedelta, by: Author
) -> tuple[ApiKey, ApiKey]:
    """The key, which now ends after `overlap` unless it ends before, and its successor of the same label, scope and
    limits.

    The successor lives as long as the key was given at first. Raises NoSuchKey, NotRotatable.
    """
    async with connection.transaction():
        old = await _locked(connection, key_id)
        now = await _now(connection)
        successor = await connection.fetchval(queries("api.operators")["successor"], key_id)
        if successor is not None:
            raise NotRotatable(f"key {key_id} was rotated before; rotate its successor {successor} instead")
        if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
            word = "is revoked" if old.revoked_at is not None else "has expired"
            raise NotRotatable(f"key {key_id} {word}; make a new one with  inferlog keys create {old.customer_id}")
        ends = now + overlap
        ending = replace(old, expires_at=ends if old.expires_at is None else min(old.expires_at, ends))
        lifetime = None if old.expires_at is None else old.expires_at - old.created_at
        if lifetime is not None and lifetime > MOMENTS.high - now:
            raise NotRotatable(
                f"a successor of key {key_id} would live {lifetime.days} days as it does, past the year 2199; "
                f"give the key an earlier end first:  inferlog keys expire {key_id} --in 365d"
            )
        made = replace(
            old,
            key_id=minted.key_id,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
            replaces_key_id=key_id,
        )
        await _update(connection, ending)
        await _insert(connection, made, minted)
        await _tell(connection, [(ending, KeyChange.ROTATED), (made, KeyChange.CREATED)], at=now, by=by)
    return ending, made


async def change_key(
    connection: Connection, key_id: str, kind: KeyChange, change: Callable[[ApiKey, datetime], ApiKey], *, by: Author
) -> tuple[ApiKey, bool]:
    """The key after `change`, which is given it and the time, and whether that was another one; when it was not, there
    is no fact.

    Changes of one key take turns, so `change` sees all that came before it. Raises NoSuchKey, NotChangeable for a
    revoked one, and what `change` raises.
    """
    async with connection.transaction():
        found = await _locked(connection, key_id)
        if found.revoked_at is not None:
            raise NotChangeable(
                f"key {key_id} is revoked; make a new one with  inferlog keys create {found.customer_id}"
            )
        now = await _now(connection)
        wanted = change(found, now)
        if wanted == found:
            return found, False
        await _update(connection, wanted)
        if wanted.limits != found.limits:
            await write_limits(connection, wanted.customer_id, key_id, wanted.limits)
        await _tell(connection, [(wanted, kind)], at=now, by=by)
    return wanted, True


async def revoke_key(connection: Connection, key_id: str, *, by: Author) -> ApiKey:
    """The key, revoked now or before; a second time changes nothing and is no second fact. Raises NoSuchKey."""
    async with connection.transaction():
        found = await _locked(connection, key_id)
        if found.revoked_at is not None:
            return found
        now = await _now(connection)
        revoked = replace(found, revoked_at=now)
        await connection.execute(queries("api.operators")["revoke_key"], key_id, now)
        await _tell(connection, [(revoked, KeyChange.REVOKED)], at=now, by=by)
    return revoked


async def _locked(connection: Connection, key_id: str) -> ApiKey:
    """The key's row, which nobody else changes until the transaction ends."""
    row = await connection.fetchrow(queries("api.operators")["lock_key"], key_id)
    if row is None:
        raise NoSuchKey(f"there is no key with the id '{key_id}'; see  inferlog keys list")
    lists = {"models": tuple(row["models"]), "operations": tuple(row["operations"])}
    return ApiKey(**{**row, **lists, "limits": await read_limits(connection, row["customer_id"], key_id)})


async def _now(connection: Connection) -> datetime:
    """The server's time, asked for under the lock, so that the times of a key's facts follow their order."""
    now: datetime = await connection.fetchval(queries("api.operators")["now"])
    return now


async def _update(connection: Connection, key: ApiKey) -> None:
    await connection.execute(
        queries("api.operators")["update_key"],
        key.key_id,
        key.requests_per_s,
        key.burst,
        key.max_concurrent,
        key.models,
        key.operations,
        key.expires_at,
    )


async def _insert(connection: Connection, key: ApiKey, minted: MintedKey) -> None:
    await connection.execute(
        queries("api.operators")["insert_key"],
        key.key_id,
        key.customer_id,
        minted.secret_sha256,
        key.label,
        key.requests_per_s,
        key.burst,
        key.max_concurrent,
        key.models,
        key.operations,
        key.created_at,
        key.expires_at,
        key.replaces_key_id,
    )
    if key.limits:
        await write_limits(connection, key.customer_id, key.key_id, key.limits)


async def _tell(connection: Connection, changes: list[tuple[ApiKey, KeyChange]], *, at: datetime, by: Author) -> None:
    facts = []
    for key, change in changes:
        described = asdict(key) | {"limits": key.limits}
        del described["created_at"]
        fact = KeyChanged(
            event_id=new_event_id(), occurred_at=at, change=change, actor=by.actor, reason=by.reason, **described
        )
        facts.append((key.key_id, fact))
    await add_facts(connection, KEYS, facts, stamp=COMMAND_STAMP)
