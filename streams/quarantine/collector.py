"""Brings the letters of workers into the table now and then, so that whoever looks at it, or counts, sees them.

Commands bring what is newer themselves; and once a letter is in the table it stays, however long the topic keeps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from infra.postgres import open_connection, queries
from infra.schema_feed import learn_nothing
from infra.settings import KafkaSettings, PostgresSettings
from infra.turns import Turn
from streams.log import open_log
from streams.quarantine.collect import collect
from streams.rounds import Rounds

FIRST_ROUND_S: Final = 5.0
ROUND_S: Final = 60.0
#: So that a flood of them leaves the ledger its share of this process.
MAX_LETTERS: Final = 5000


class Collector(Rounds):
    """Collects for one installation; one process at a time does. `state` is starting, standby, collecting, idle, away.

    `learn_schemas` returns once this process knows every schema that was published before the call.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        postgres: PostgresSettings,
        *,
        learn_schemas: Callable[[], Awaitable[None]] = learn_nothing,
        max_letters: int = MAX_LETTERS,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__("collecting dead letters", first_round_s=FIRST_ROUND_S, round_s=ROUND_S, sleep=sleep)
        self._kafka = kafka
        self._postgres = postgres
        self._learn_schemas = learn_schemas
        self._max_letters = max_letters
        self.collected = 0

    def figures(self) -> dict[str, Any]:
        """The standing as plain values, for /healthz; `collected` is the letters that this process has read."""
        return {"state": self.state, "why": self.why, "collected": self.collected}

    async def round(self) -> None:
        """Bring what is new into the table, up to `max_letters` or the topic's end. Raises BusUnavailable, and more."""
        # 1  become the one that does it    dying after it: the lock ends with the session
        # 2  collect, slice by slice        dying in between: the next round goes on; see `collect`
        async with open_connection(self._postgres, command_timeout_s=10) as connection:
            if not await connection.fetchval(queries("infra")["try_turn"], Turn.COLLECTOR):
                self._enter("standby", "another process collects")
                return
            self._enter("collecting")
            async with open_log(self._kafka, decodes=False) as reader:
                self.collected += await collect(
                    connection,
                    reader,
                    namespace=self._kafka.namespace,
                    learn_schemas=self._learn_schemas,
                    max_letters=self._max_letters,
                )
            self._enter("idle")
