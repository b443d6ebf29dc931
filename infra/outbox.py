"""A table's changes become records, in order: a change's transaction writes them, one relay reads and removes them.

    BEGIN … change … add_facts … COMMIT        the relay reads the rows, publishes, removes them

Either both the change and its record are committed or neither is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NamedTuple
from uuid import UUID

from infra.kafka_topic_ids import Position
from infra.postgres import Connection, queries
from infra.turns import Turn
from schemas.codec import encode
from schemas.facts import Fact
from schemas.headers import EVENT_ID, Headers, Stamp
from schemas.records import DeadLetter
from schemas.topics import Topic

# A writer that is frozen between its last fact and its COMMIT loses its session, and with it the lock. Less than the
# 10 s that the ledger waits for a statement, so that whoever waits behind it comes through. Waiters need no deadline on
# the server: one that is gone is given the lock in its turn, and loses it in the same way.
ORDER_HELD_MS: Final = 5_000
#: How the relay's session is named in pg_stat_activity.
RELAY_SESSION: Final = "inferlog outbox relay"


async def add_facts(
    connection: Connection, topic: Topic, keyed: Sequence[tuple[str, Fact | DeadLetter]], *, stamp: Stamp
) -> None:
    """Put facts, each with its key, into the outbox; call it last in the transaction, which must be open.

    Last, because from here to the end of the transaction every other writer of facts waits. Postgres ends the session,
    and takes everything back, when nothing comes from it for 5 s before the transaction ends. Raises EncodeError before
    anything is written, and what Postgres raises.
    """
    if not keyed:
        return
    if not connection.is_in_transaction():
        raise RuntimeError("facts are written in the transaction of their change, and none is open")
    values = [encode(fact) for _, fact in keyed]
    headers = [_headers(fact, stamp) for _, fact in keyed]
    await connection.execute(queries("infra")["outbox_order"], Turn.FACTS, str(ORDER_HELD_MS))
    await connection.execute(
        queries("infra")["outbox_add"],
        [fact.event_id for _, fact in keyed],
        topic.name,
        [key.encode() for key, _ in keyed],
        values,
        headers,
    )


class FramedFact(NamedTuple):
    """A fact as the outbox holds it; `topic` is without the installation's namespace, `headers` are JSON."""

    event_id: UUID
    topic: str
    key: bytes
    value: bytes
    headers: str


def framed(topic: Topic, key: str, fact: Fact, *, stamp: Stamp) -> FramedFact:
    """A fact made ready for the outbox. Raises EncodeError."""
    return FramedFact(fact.event_id, topic.name, key.encode(), encode(fact), _headers(fact, stamp))


async def add_earlier_facts(connection: Connection, facts: Sequence[FramedFact]) -> None:
    """Put facts, in the order given, before every fact that waits, at positions up to 0.

    For facts that are older than all of those; no relay may publish meanwhile. Raises a unique violation when one of
    them waits already.
    """
    columns = list(zip(*facts, strict=True))
    if columns:
        await connection.execute(queries("infra")["outbox_add_earlier"], *map(list, columns))


def _headers(fact: Fact | DeadLetter, stamp: Stamp) -> str:
    return json.dumps({name: value.decode() for name, value in stamp.headers(type(fact))})


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingFact:
    """A row of the outbox; `topic` is without the installation's namespace."""

    position: int
    event_id: UUID
    topic: str
    key: bytes
    value: bytes
    headers: Headers


class Seen(NamedTuple):
    """What a record that carries a fact's id says; `topic` is without the installation's namespace."""

    event_id: UUID
    topic: str
    key: bytes
    value: bytes


async def take_relay_lock(connection: Connection, *, lease_s: float) -> bool:
    """Become the one relay of this database, for as long as the session lives and is used; False when another is.

    Postgres ends the session, and frees the lock, once it has been silent for `lease_s`: a relay that is frozen, or
    whose machine is gone, does not keep the others out.
    """
    milliseconds = str(int(lease_s * 1000))
    await connection.fetch(queries("infra")["outbox_session"], milliseconds, RELAY_SESSION)
    taken: bool = await connection.fetchval(queries("infra")["try_turn"], Turn.RELAY)
    return taken


async def first_waiting(
    connection: Connection, *, rows: int, size_bytes: int, apart_from: Sequence[str] = ()
) -> list[WaitingFact]:
    """The oldest facts in order: at most `rows`, and together at most `size_bytes` unless the first has more.

    Facts of the topics in `apart_from` are left out.
    """
    found = await connection.fetch(queries("infra")["outbox_first"], rows, size_bytes, list(apart_from))
    return [
        WaitingFact(
            position=r["position"],
            event_id=r["event_id"],
            topic=r["topic"],
            key=r["key"],
            value=r["value"],
            headers=[
                # A record with two ids would be taken for another writer's when the topic is looked at.
                *((name, text.encode()) for name, text in json.loads(r["headers"]).items() if name != EVENT_ID),
                (EVENT_ID, str(r["event_id"]).encode()),
            ],
        )
        for r in found
    ]


async def topics_waiting(connection: Connection) -> dict[str, Position]:
    """The topics for which facts wait, each with the position up to which it has been looked at."""
    found = await connection.fetch(queries("infra")["outbox_topics_waiting"])
    return {r["topic"]: Position(r["topic_id"], r["next_offset"]) for r in found}


async def settle(connection: Connection, seen: Sequence[Seen], reached: Mapping[str, Position]) -> int:
    """Remove facts that are on their topics and note up to where these have been looked at, in one step.

    A record is a waiting fact when id, topic, key and value are the same: whoever may write to a topic can write any id
    into a header. Returns how many of them were waiting.
    """
    removed: int = await connection.fetchval(
        queries("infra")["outbox_settle"],
        [fact.event_id for fact in seen],
        [fact.topic for fact in seen],
        [fact.key for fact in seen],
        [sha256(fact.value).digest() for fact in seen],
        list(reached),
        [position.topic_id for position in reached.values()],
        [position.next_offset for position in reached.values()],
    )
    return removed
