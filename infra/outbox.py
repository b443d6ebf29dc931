"""A table's changes become records, in order: the writing half, called inside the transaction of the change.

    BEGIN … change … add_facts … COMMIT        the relay (streams.relay) reads the rows, publishes and removes them

Either both the change and its record are committed or neither is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from infra.postgres import Connection, queries
from schemas.codec import encode
from schemas.facts import Fact
from schemas.headers import Stamp
from schemas.records import DeadLetter
from schemas.topics import Topic

# Held from the first fact of a transaction to its end, so that positions are given out in the order of commits.
ORDER_LOCK = 0x1F_E0_10_8


async def add_facts(
    connection: Connection, topic: Topic, keyed: Sequence[tuple[str, Fact | DeadLetter]], *, stamp: Stamp
) -> None:
    """Put facts, each with its key, into the outbox; call it last in the transaction, which must be open.

    Last, because from here to the end of the transaction every other writer of facts waits. Raises EncodeError before
    anything is written, and what Postgres raises.
    """
    if not keyed:
        return
    if not connection.is_in_transaction():
        raise RuntimeError("facts are written in the transaction of their change, and none is open")
    values = [encode(fact) for _, fact in keyed]
    headers = [json.dumps({n: v.decode() for n, v in stamp.headers(type(fact))}) for _, fact in keyed]
    await connection.execute(queries("infra")["outbox_order"], ORDER_LOCK)
    await connection.execute(
        queries("infra")["outbox_add"],
        [fact.event_id for _, fact in keyed],
        topic.name,
        [key.encode() for key, _ in keyed],
        values,
        headers,
    )
