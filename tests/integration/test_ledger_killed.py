"""The ledger dies, or loses Postgres, at each named point of its transaction: every request is billed once.

The points are those of `Delivery._write`'s list; the last two lie after COMMIT, where only the broker lags behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGKILL

import pytest

from infra.postgres import open_pool
from infra.settings import PostgresSettings
from schemas.records import UsageRecorded
from streams.ledger.delivery import Delivery
from streams.ledger.tables import Ledger
from tests.conditions import eventually
from tests.integration.commit_cutter import AFTER, BEFORE, PASS, open_cutter
from tests.integration.ledger_world import LedgerWorld, Spawn, usages
from tests.unit.streams.usage_samples import TOPIC, raw, usage

UNCOMMITTED = ("before count", "after count", "after set_aside", "after advance", "after tell")
COMMITTED = ("after COMMIT", "after the offsets")
VARIANT = "tests.integration.ledger_variants:dies_at"
SMALL = {"INFERLOG_LEDGER_BATCH": "20"}
PARTITION = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What is in the tables, and the broker's offset."""

    sums: dict[str, int]
    position: int
    letters: int
    offset: int


async def books(world: LedgerWorld) -> Books:
    return Books(
        sums=await world.sums(),
        position=(await world.positions()).get(PARTITION, 0),
        letters=await world.value("SELECT count(*) FROM dead_letters"),
        offset=(await world.committed()).get(PARTITION, 0),
    )


def with_faults(records: list[UsageRecorded]) -> list[UsageRecorded | bytes]:
    """Each twice, and a broken one first, so that every batch has something for every step."""
    return [x for r in records for x in (b"broken", r, r)]


async def test_killed_at_any_point_it_bills_each_request_once(either: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(either, spawn)
    counted = 0
    for point in (*UNCOMMITTED, *COMMITTED):
        await world.produce(with_faults(usages(10, customers=3)), partition=PARTITION)
        counted += 10
        before = await books(world)
        worker = world.worker(VARIANT, settings={**SMALL, "DIES_AT": point}, ready=False)
        assert worker.wait(60) == -SIGKILL, f"{point}: {worker.tail()}"
        after = await books(world)
        if point in UNCOMMITTED:
            assert after == before, f"{point}: something was kept"
        else:
            assert after.position > before.position, point
            # However much a batch held, what is before the position is in the books, and nothing else.
            assert after.sums.get("requests", 0) == (after.position + 1) // 3, point
            assert after.letters == (after.position + 2) // 3, point
            assert after.offset <= after.position, point
            assert (after.offset > before.offset) is (point == "after the offsets"), point
    world.worker(settings=SMALL)
    await world.caught_up()
    await world.acknowledged()
    assert await books(world) == Books(
        sums={"requests": counted, "items": 4 * counted}, position=3 * counted, letters=counted, offset=3 * counted
    )


async def test_cut_off_during_commit_it_bills_each_request_once(either: dict[str, str], spawn: Spawn) -> None:
    """Postgres has the COMMIT or has it not, and the ledger cannot know."""
    world = LedgerWorld(either, spawn)
    await world.produce(with_faults(usages(100, customers=3)), partition=PARTITION)
    script = [BEFORE, AFTER, PASS, AFTER, AFTER, BEFORE, BEFORE, PASS]
    async with open_cutter(either["INFERLOG_POSTGRES_DSN"], script) as cutter:
        worker = world.worker(settings={**SMALL, "INFERLOG_POSTGRES_DSN": cutter.dsn}, ready=False)

        def all_cut() -> bool:
            if worker.returncode is not None:
                raise SystemError(f"the ledger ended with {worker.returncode}:\n{worker.tail()}")
            return cutter.done

        await eventually(all_cut, timeout_s=60, what="every cut made")
        await world.caught_up()
        await world.acknowledged()
        assert worker.returncode is None
        worker.kill()
    assert await books(world) == Books(sums={"requests": 100, "items": 400}, position=300, letters=100, offset=300)


@pytest.mark.parametrize("cut", [BEFORE, AFTER])
async def test_a_batch_whose_commit_is_cut_off_is_written_once(env: dict[str, str], cut: str) -> None:
    """And what Postgres holds at that moment is what the cut says: nothing of it, or all."""
    seen: list[dict[int, int]] = []
    async with (
        open_cutter(env["INFERLOG_POSTGRES_DSN"], [cut]) as cutter,
        open_pool(PostgresSettings(dsn=cutter.dsn), max_size=1) as through,
        open_pool(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"]), max_size=1) as past,
    ):
        direct = Ledger(past, group="g")

        async def look(_pause_s: float) -> None:
            async def settled() -> bool:  # a server that lost its client takes a moment to notice
                busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND xact_start < now()"
                return await past.fetchval(f"{busy} AND pid <> pg_backend_pid()") == 0

            await eventually(settled, what="the cut transaction over")
            seen.append(await direct.positions(TOPIC))

        delivery = Delivery(Ledger(through, group="g"), give_up_s=60, sleep=look)
        await delivery.deliver([raw(usage(n), n) for n in range(3)])
        assert seen == [{} if cut == BEFORE else {0: 3}]
        assert cutter.commits == 2
        assert await direct.positions(TOPIC) == {0: 3}
        rows = await past.fetch("SELECT meter, sum(quantity)::bigint FROM usage_hourly GROUP BY meter ORDER BY meter")
        assert [tuple(r) for r in rows] == [("items", 12), ("requests", 3)]
