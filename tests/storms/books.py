"""Compares the ledger with what was sent: per hour and meter to the unit, and request by request.

The generator's side is computed anew from the seed, a slice at a time; nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from infra.postgres import Connection, open_connection
from infra.settings import PostgresSettings
from tests.storms.usage_stream import HourKey, UsageStream

_SLICE = 20_000
_EXAMPLES = 10
#: The meter that every request has once.
_REQUESTS = "requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """`missing`: requests sent and not billed; `double`: billed and not sent, or billed again. In requests.

    `wrong_sums` counts the hourly sums that are not the generator's, `examples` shows the first of them.
    """

    missing: int
    double: int
    wrong_sums: int
    dead_letters: int
    examples: tuple[str, ...]

    @property
    def even(self) -> bool:
        """Nothing is wrong."""
        return not (self.missing or self.double or self.wrong_sums or self.dead_letters)


def weigh(
    sent: Mapping[HourKey, int], billed: Mapping[HourKey, int], *, absent: int, strangers: int, dead_letters: int
) -> Balance:
    """Judge the sums, and what the ledger knows of requests: `absent` were sent, `strangers` were not."""
    wrong = sorted(key for key in sent.keys() | billed.keys() if sent.get(key, 0) != billed.get(key, 0))
    short = over = 0
    for key in wrong:
        if key[-1] == _REQUESTS:
            difference = billed.get(key, 0) - sent.get(key, 0)
            short, over = short + max(0, -difference), over + max(0, difference)
    return Balance(
        missing=max(absent, short),
        double=max(strangers, over),
        wrong_sums=len(wrong),
        dead_letters=dead_letters,
        examples=tuple(f"{key}: sent {sent.get(key, 0)}, billed {billed.get(key, 0)}" for key in wrong[:_EXAMPLES]),
    )


async def balance(settings: PostgresSettings, stream: UsageStream) -> Balance:
    """Judge everything that was taken from the stream, once the ledger has read all of it."""
    async with open_connection(settings, command_timeout_s=120) as connection:
        rows = await connection.fetch(
            "SELECT customer_id, hour, model, version, price_id, meter, quantity FROM usage_hourly"
        )
        known = await _known(connection, stream)
        counted = await connection.fetchval("SELECT count(*) FROM processed_requests")
        dead = await connection.fetchval("SELECT count(*) FROM dead_letters")
    billed: dict[HourKey, int] = {tuple(r)[:6]: r["quantity"] for r in rows}
    return weigh(stream.sums, billed, absent=stream.unique - known, strangers=counted - known, dead_letters=dead)


async def _known(connection: Connection, stream: UsageStream) -> int:
    """How many of the requests that were sent the ledger has counted."""
    known = 0
    numbers = iter(range(stream.unique))
    while some := [stream.event(n).request_id for n in islice(numbers, _SLICE)]:
        known += await connection.fetchval(
            "SELECT count(*) FROM processed_requests WHERE request_id = ANY ($1::uuid[])", some
        )
    return known
