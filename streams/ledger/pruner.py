"""Lets go of what the ledger remembers of requests past the horizon, slice by slice, in nobody's way.

The horizon follows the ledger's own progress and not the clock alone: usage that waits unread through a long outage, or
that a restored database has to read again, is never past it (docs/decisions/0014-the-dedup-horizon.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Final
from uuid import UUID

from infra.pause import Pause
from infra.postgres import Connection, connect, queries
from infra.settings import PostgresSettings
from infra.turns import Turn
from streams.rounds import Rounds

log = logging.getLogger(__name__)

#: How the session is named in pg_stat_activity.
SESSION: Final = "inferlog dedup pruner"
#: A ledger that has just begun has records to count first.
FIRST_ROUND_S: Final = 60.0
ROUND_S: Final = 600.0
_FIRST_POLL_S: Final = 0.1
_LONGEST_POLL_S: Final = 5.0
#: Between two slices: at least so long, and three times as long as the last one took.
_REST_S: Final = 0.02
_REST_RATIO: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The bounds of what is remembered, and of how many partitions the watermark is known; see `dedup.Bounds`."""

    counts_from: datetime | None
    first_id: UUID | None
    watermarks: int


class Pruner(Rounds):
    """Keeps `processed_requests` of one database to the requests of about the last `horizon`.

    `group` and `topic` name the ledger's position, `partitions` is how many the topic has. `state` is starting, standby
    (another process does it), waiting (for transactions that are older than the horizon's last move), pruning, idle or
    away, and `why` says more.
    """

    def __init__(
        self,
        postgres: PostgresSettings,
        *,
        group: str,
        topic: str,
        partitions: int,
        horizon: timedelta,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__("letting go of counted requests", first_round_s=FIRST_ROUND_S, round_s=ROUND_S, sleep=sleep)
        self._postgres = postgres
        self._group = group
        self._topic = topic
        self._partitions = partitions
        self._horizon = horizon
        self.let_go = 0
        self.counts_from: datetime | None = None
        self.finished_at: datetime | None = None

    def figures(self) -> dict[str, Any]:
        """The standing as plain values, for /healthz; `let_go` is the rows that this process has removed."""
        return {
            "state": self.state,
            "why": self.why,
            "counts_from": _iso(self.counts_from),
            "let_go": self.let_go,
            "finished_at": _iso(self.finished_at),
        }

    async def round(self) -> None:
        """Move the horizon as far as the ledger has come, then let go of what lies past it.

        Raises what infra.postgres raises.
        """
        # 1  become the one that does it            dying after it: the lock ends with the session
        # 2  move the horizon forward, and COMMIT   from here on transactions set aside what lies before it; dying after
        #                                           it: nothing was let go of yet, and the next round begins here
        # 3  wait for the end of every transaction that is open: it may have seen the horizon before, and count by rows
        #    that are to go; nobody waits for this one
        # 4  delete slice by slice, each a transaction of its own; dying in between: the next round goes on
        sql = queries("streams.ledger")
        async with _open_session(self._postgres) as connection:
            if not await connection.fetchval(queries("infra")["try_turn"], Turn.PRUNER):
                self._enter("standby", "another process lets go of counted requests")
                return
            await connection.execute(sql["dedup_move"], self._group, self._topic, self._partitions, self._horizon)
            known = await self._known(connection)
            self.counts_from = known.counts_from
            gone = 0
            if known.first_id is not None:
                await self._older_transactions(connection)
                self._enter("pruning")
                gone = await self._prune(connection, known.first_id)
            if gone:
                log.info("let go of %d counted requests from before %s", gone, _iso(known.counts_from))
            self.finished_at = datetime.now(timezone.utc)
            few = None
            if known.watermarks < self._partitions:
                few = f"the usage watermark is known of {known.watermarks} of {self._partitions} partitions"
            self._enter("idle", few)

    async def _known(self, connection: Connection) -> Known:
        row = await connection.fetchrow(queries("streams.ledger")["dedup_known"], self._group, self._topic)
        if row is None:
            raise RuntimeError("the table ledger_dedup has lost its row; restore it, with the horizon that it held")
        return Known(**dict(row))

    async def _older_transactions(self, connection: Connection) -> None:
        """Return once every transaction that is open now has ended, however long that takes."""
        sql = queries("streams.ledger")["dedup_open"]
        poll = Pause(_FIRST_POLL_S, _LONGEST_POLL_S)
        left = {r["transaction"] for r in await connection.fetch(sql)}
        while left:
            self._enter("waiting", f"{len(left)} transactions that are older than the horizon's move are still open")
            await self._sleep(poll.next_s())
            left &= {r["transaction"] for r in await connection.fetch(sql)}

    async def _prune(self, connection: Connection, first_id: UUID) -> int:
        sql = queries("streams.ledger")["dedup_slice"]
        reached: UUID | None = UUID(int=0)
        total = 0
        while reached is not None:
            began_s = time.monotonic()
            for row in await connection.fetch(sql, reached, first_id):  # it is one
                reached = row["reached"]
                total += row["gone"]
                self.let_go += row["gone"]
            if reached is not None:
                await self._sleep(max(_REST_S, _REST_RATIO * (time.monotonic() - began_s)))
        return total


@asynccontextmanager
async def _open_session(settings: PostgresSettings) -> AsyncIterator[Connection]:
    """The session that holds the lock; dropped without a word, so that a server that is stopped delays nobody."""
    connection = await connect(settings, timeout_s=5, command_timeout_s=10)
    try:
        await connection.execute(queries("streams.ledger")["dedup_session"], SESSION)
        yield connection
    finally:
        connection.terminate()


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
