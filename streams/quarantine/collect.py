"""The letters of the workers, brought from the dead-letter topic into the table that the ledger writes by itself.

Only letters about requests are taken from the topic. One about usage is in the table from the transaction that set it
aside; one that is only on the topic was written by a stranger, and redriving it would bill what nobody used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final

from infra.kafka_spans import span_from
from infra.postgres import Connection, is_data_error, queries
from infra.schema_feed import learn_nothing
from schemas.codec import DecodeError, decode_at
from schemas.keys import prefixed
from schemas.records import DeadLetter
from schemas.topics import DEAD_LETTERS, POOL_NAME, requests_topic
from streams.ledger.dead_letters import KIND_PATTERNS, SLICE_BYTES
from streams.ledger.halving import refused_of
from streams.ledger.transaction import LedgerTransaction
from streams.log import LogReader, Span

log = logging.getLogger(__name__)

_SLICE_LETTERS: Final = 500
_NAMED_AT_ONCE: Final = 5000


async def name_kinds(connection: Connection) -> None:
    """Give every letter a kind that has none yet: those that the ledger wrote and those of older releases."""
    kinds, patterns = zip(*KIND_PATTERNS, strict=True)
    sql = queries("streams.quarantine")["name_kinds"]
    while await connection.fetchval(sql, [k.value for k in kinds], list(patterns), _NAMED_AT_ONCE):
        pass


async def collect(
    connection: Connection,
    reader: LogReader,
    *,
    namespace: str,
    learn_schemas: Callable[[], Awaitable[None]] = learn_nothing,
    max_letters: int | None = None,
) -> int:
    """Bring what is new on the topic, up to its end as of now, into the table; returns how many letters were read.

    `learn_schemas` has this process know every schema that was published before the call. Ends early at `max_letters`;
    the next call goes on from there. Raises BusUnavailable, and what Postgres raises. May run many times at once: a
    letter is there once.
    """
    # Per slice one Postgres transaction: 1 letters that are not there yet  2 the offset up to which they were read
    # Dying before its COMMIT: the slice is read again. After it: it is not.
    sql = queries("streams.quarantine")
    topic, group = DEAD_LETTERS.in_namespace(namespace).name, prefixed(namespace, "dead-letters")
    known = {r["partition"]: r["next_offset"] for r in await connection.fetch(sql["reached"], group, topic)}
    ours = LedgerTransaction(connection, group=group)
    total = 0

    async def put(letters: Sequence[DeadLetter], partition: int, reached: int) -> None:
        async with connection.transaction():
            await _keep(connection, ours, letters)
            await connection.execute(sql["reach"], group, topic, partition, reached)

    spans = await reader.freeze(topic, DEAD_LETTERS.partitions)
    await learn_schemas()  # after the freeze, so that whatever lies below those ends is understood
    for partition, kept in spans.items():
        new = span_from(known.get(partition, 0), first=kept.first, end=kept.end)
        waiting: list[DeadLetter] = []
        size_bytes = 0
        span = Span(first=kept.first, begin=new.start, end=new.stop)
        reached = new.stop
        async with aclosing(reader.read(topic, {partition: span})) as reading:
            async for entry in reading:
                letter = _taken(entry, namespace)
                if letter is not None:
                    waiting.append(letter)
                    size_bytes += len(letter.value or b"")
                    total += 1
                if total == max_letters:
                    reached = entry.offset + 1
                    break
                if len(waiting) >= _SLICE_LETTERS or size_bytes >= SLICE_BYTES:
                    await put(waiting, partition, entry.offset + 1)
                    waiting, size_bytes = [], 0
        if new:
            await put(waiting, partition, reached)
        if total == max_letters:
            break
    await name_kinds(connection)
    return total


def _taken(entry: object, namespace: str) -> DeadLetter | None:
    """The letter of this record, if it is about a request of this installation."""
    try:
        letter: DeadLetter = decode_at(entry, DeadLetter)  # type: ignore[arg-type]
    except DecodeError as error:
        log.warning("not a dead letter: %s", error)
        return None
    any_pool = re.escape(requests_topic("*").in_namespace(namespace).name).replace(r"\*", POOL_NAME)
    return letter if re.fullmatch(any_pool, letter.topic) else None


async def _keep(connection: Connection, ours: LedgerTransaction, letters: Sequence[DeadLetter]) -> None:
    """Put letters into the table; one that Postgres refuses, as only a stranger would write it, is left out."""

    async def keep(part: Sequence[DeadLetter]) -> None:
        async with connection.transaction():
            await ours.set_aside(part)

    if letters:
        by_place = sorted(letters, key=lambda x: (x.topic, x.partition, x.offset))
        for _, error in await refused_of(by_place, keep, blames=is_data_error):
            log.warning("a letter on the topic is left out: %s: %s", type(error).__name__, error)
