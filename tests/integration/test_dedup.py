"""Evidence is let go of on real Postgres: after the horizon has moved, in nobody's way, and billing nobody twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from uuid import UUID, uuid4

import pytest

from infra.postgres import open_pool
from infra.settings import PostgresSettings
from schemas.ids import new_request_id
from schemas.records import UsageRecorded
from schemas.topics import USAGE
from streams.ledger.delivery import Delivery
from streams.ledger.pruner import Pruner
from streams.ledger.stretches import Stretch
from streams.ledger.tables import Ledger
from streams.replay.verify import verify
from tests.conditions import eventually
from tests.factories import usage
from tests.integration.ledger_world import Spawn, health
from tests.integration.quarantine_desk import BECAUSE, PARTITION, QuarantineDesk
from tests.unit.streams.usage_samples import TOPIC, located, raw

DAY = timedelta(days=1)
NOW = datetime.now(timezone.utc).replace(microsecond=0)


def made(days_ago: float = 0, **changes: object) -> UsageRecorded:
    """Usage of a request made so many days ago."""
    at = NOW - timedelta(days=days_ago)
    request_id = new_request_id(now_ns=int(at.timestamp()) * 1_000_000_000)
    fields = {"request_id": request_id, "occurred_at": at, "quantities": {"requests": 1, "items": 4}, **changes}
    return usage(**fields)


class Tables:
    """The ledger's tables, with a ledger and pruners at work on them. `rests` are the pauses between slices."""

    def __init__(self, ledger: Ledger, dsn: str, group: str = "usage-ledger", topic: str = TOPIC) -> None:
        self.ledger = ledger
        self.delivery = Delivery(ledger, give_up_s=30)
        self.rests = 0
        self.at_rest: Callable[[], Awaitable[None]] | None = None
        self._dsn = dsn
        self._group = group
        self._topic = topic
        self._offset = 0

    def pruner(self, *, days: int = 40) -> Pruner:
        return Pruner(
            PostgresSettings(dsn=self._dsn),
            group=self._group,
            topic=self._topic,
            partitions=USAGE.partitions,
            horizon=timedelta(days=days),
            sleep=self._sleep,
        )

    async def _sleep(self, seconds: float) -> None:
        self.rests += 1
        if self.at_rest is not None:
            await self.at_rest()
        await asyncio.sleep(min(seconds, 0.02))

    async def complete(self, until: datetime = NOW, *, partitions: int = USAGE.partitions) -> None:
        """As the watermark says it of so many partitions."""
        for partition in range(partitions):
            await self.ledger._pool.execute(
                "INSERT INTO usage_watermarks VALUES ($1, $2, $3, $4, now()) ON CONFLICT "
                "(consumer_group, topic, partition) DO UPDATE SET complete_until = excluded.complete_until",
                *(self._group, self._topic, partition, until),
            )

    async def deliver(self, *records: UsageRecorded) -> None:
        """Read these next."""
        begin = self._offset
        self._offset += len(records)
        await self.delivery.deliver([raw(r, begin + n) for n, r in enumerate(records)])

    async def remembered(self) -> set[UUID]:
        rows = await self.ledger._pool.fetch("SELECT request_id FROM processed_requests")
        return {UUID(int=r["request_id"].int) for r in rows}

    async def counts_from(self) -> datetime | None:
        found: datetime | None = await self.ledger._pool.fetchval("SELECT counts_from FROM ledger_dedup")
        return found

    async def items(self) -> int:
        return int(await self.ledger._pool.fetchval("SELECT sum(quantity) FROM usage_hourly WHERE meter = 'items'"))

    async def kinds(self) -> list[str]:
        return [r["kind"] for r in await self.ledger._pool.fetch('SELECT kind FROM dead_letters ORDER BY "offset"')]


@pytest.fixture
async def tables(env: dict[str, str]) -> AsyncIterator[Tables]:
    dsn = env["INFERLOG_POSTGRES_DSN"]
    async with open_pool(PostgresSettings(dsn=dsn), max_size=4) as pool:
        yield Tables(Ledger(pool, group="usage-ledger"), dsn)


def hour(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0)


async def test_the_horizon_follows_what_is_complete_and_only_forward(tables: Tables) -> None:
    pruner = tables.pruner()
    for partitions in (0, USAGE.partitions - 1):
        await tables.complete(partitions=partitions)
        await pruner.round()
        assert await tables.counts_from() is None
        assert pruner.figures()["why"] == f"the usage watermark is known of {partitions} of 8 partitions"
    await tables.complete()
    await tables.complete(NOW - 3 * DAY, partitions=1)
    await pruner.round()
    assert await tables.counts_from() == hour(NOW - 43 * DAY), "the one that is furthest behind, for it may yet count"
    await tables.complete(NOW + 1000 * DAY)
    await pruner.round()
    moved = await tables.counts_from()
    assert moved is not None
    assert hour(NOW - 40 * DAY) <= moved <= NOW - 39.9 * DAY, "a clock that was wrong takes it no further than now"
    await tables.complete(NOW - 10 * DAY)
    await tables.pruner(days=400).round()
    assert await tables.counts_from() == moved
    assert pruner.figures()["counts_from"] == moved.isoformat()


@pytest.mark.parametrize("point", ["opened", "counted", "moved"])
async def test_rows_wait_for_every_transaction_that_knew_the_horizon_before(tables: Tables, point: str) -> None:
    old, pruner = made(41), tables.pruner()
    await tables.deliver(old)
    await tables.complete()
    copy = Stretch(topic=TOPIC, partition=5, begin=0, end=1)

    async def prune() -> asyncio.Task[None]:
        task = asyncio.create_task(pruner.round())
        await eventually(lambda: pruner.state == "waiting" or task.done(), what="the pruner to wait")
        return task

    async with tables.ledger.transaction() as t:
        opening = await t.opening([copy])
        if point == "opened":
            task = await prune()
        assert opening.bounds.objection(old, DAY) is None, "as it was when this transaction began"
        assert not (await t.count([located(old)])).fresh, "or it would be billed again"
        if point == "counted":
            task = await prune()
        await t.advance([copy])
        if point == "moved":
            task = await prune()
        # Meanwhile nobody else waits: others count, and set aside what only this transaction may still count.
        await tables.deliver(made(1), made(41))
        assert not task.done()
        assert old.request_id in await tables.remembered()
    await asyncio.wait_for(task, 30)
    assert old.request_id not in await tables.remembered()
    assert await tables.items() == 8
    assert await tables.kinds() == ["horizon"]


async def test_killed_after_the_horizon_moved_the_next_one_lets_go(tables: Tables) -> None:
    old, pruner = made(41), tables.pruner()
    await tables.deliver(old)
    await tables.complete()
    async with tables.ledger.transaction() as t:
        await t.opening([])
        task = asyncio.create_task(pruner.round())
        await eventually(lambda: pruner.state == "waiting", what="the pruner to wait")
        other = tables.pruner()
        await other.round()
        assert other.figures()["state"] == "standby"
        task.cancel()
        await asyncio.wait({task})
    assert old.request_id in await tables.remembered()
    await tables.deliver(old)  # from the move on, whether or not its row is there
    assert await tables.kinds() == ["horizon"]

    async def done() -> bool:
        await other.round()
        return other.figures()["state"] == "idle"

    await eventually(done, what="the lock of the one that was killed to be free")
    assert await tables.remembered() == set()
    assert other.figures()["let_go"] == 1
    assert await tables.items() == 4


async def test_slices_go_by_while_the_ledger_works_and_leave_what_is_kept(tables: Tables) -> None:
    rows = [made(41 + n / 1000) for n in range(2500)]
    async with tables.ledger.transaction() as t:
        await t.count([located(r) for r in rows])
    untimed = replace(made(41), request_id=UUID(int=7))
    late, fresh = made(41, request_id=new_request_id()), [made(1), made(39)]
    await tables.deliver(untimed, late, *fresh)
    await tables.complete()
    held = made(0)

    async def work() -> None:
        async with tables.ledger.transaction() as t:  # still open while further slices go
            await t.count([located(held)])
            before = tables.rests
            await eventually(lambda: tables.rests > before, what="another slice to go")

    working: list[asyncio.Task[None]] = []

    async def start() -> None:
        if not working:
            working.append(asyncio.create_task(work()))

    tables.at_rest = start
    pruner = tables.pruner()
    await asyncio.wait_for(pruner.round(), 30)
    await asyncio.wait_for(working[0], 30)
    assert pruner.let_go == 2500
    assert await tables.remembered() == {r.request_id for r in (untimed, late, *fresh, held)}


async def test_nothing_is_let_go_of_past_the_horizon_of_the_database(tables: Tables) -> None:
    """A pruner that slept through a restored backup has a horizon of its own in mind."""
    await tables.deliver(made(41))
    await tables.complete()
    pruner = tables.pruner()

    async def restore() -> None:
        await tables.ledger._pool.execute("UPDATE ledger_dedup SET counts_from = NULL, first_id = NULL")

    async with tables.ledger.transaction() as t:
        await t.opening([])
        task = asyncio.create_task(pruner.round())
        await eventually(lambda: pruner.state == "waiting", what="the pruner to wait")
        await restore()
    await asyncio.wait_for(task, 30)
    assert len(await tables.remembered()) == 1


@pytest.fixture
def desk(env: dict[str, str], spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> QuarantineDesk:
    monkeypatch.setattr("streams.replay.verify.SETTLE_S", 0.0)
    return QuarantineDesk(env, spawn)


async def i1(desk: QuarantineDesk) -> tuple[bool | None, dict[str, int | None]]:
    verdict = (await verify(desk.settings)).verdicts[0]
    return verdict.holds, dict(verdict.figures)


async def test_what_is_past_the_horizon_is_counted_once_by_decision_and_verify_agrees(desk: QuarantineDesk) -> None:
    dsn = desk.env["INFERLOG_POSTGRES_DSN"]
    async with open_pool(PostgresSettings(dsn=dsn), max_size=2) as pool:
        tables = Tables(Ledger(pool, group=desk.group), dsn, desk.group, desk.topic)
        counted, never = made(50), made(45)
        await desk.produce([counted, made(1)], partition=PARTITION)
        await desk.count_but({})
        await tables.complete()
        await tables.pruner().round()
        assert len(await tables.remembered()) == 1
        holds, figures = await i1(desk)
        assert (holds, figures["let_go"], figures["requests"]) == (True, 1, 2), "its sums prove it"

        reason = "occurred_at: long ago is older than the dedup horizon"
        first, second, again = await desk.set_aside([never, never, counted], reason)
        (early,) = await desk.set_aside([made(-1 / 24)], "occurred_at: soon lies in the future")
        assert [x["kind"] for x in desk.said("list")["letters"]] == ["horizon"] * 3 + ["future"]
        assert (await i1(desk))[0] is False, "set aside and never billed"
        refused = desk.said("redrive", "--all", *BECAUSE, exit_code=3)
        assert refused["counts"]["refused"] == 4
        assert "older than the dedup horizon" in refused["first"][0]["why"]
        assert "in the future" in refused["first"][3]["why"]

        assert desk.outcomes("redrive", first, "--accept", "horizon", *BECAUSE) == {"counted": 1}
        await tables.pruner().round()
        assert never.request_id in await tables.remembered(), "a decision is remembered for ever"
        assert desk.outcomes("redrive", second, "--accept", "horizon", *BECAUSE) == {"already_counted": 1}
        assert desk.outcomes("discard", again, *BECAUSE) == {"discarded": 1}
        desk.env["INFERLOG_LEDGER_FUTURE_S"] = "7200"
        assert desk.outcomes("redrive", early, *BECAUSE) == {"counted": 1}
        assert await desk.sums() == {"requests": 4, "items": 16}
        assert (await i1(desk))[0] is True

        await pool.execute(
            "UPDATE usage_hourly SET quantity = quantity + 4 WHERE hour = $1 AND meter = 'items'", hour(NOW - 50 * DAY)
        )
        assert (await i1(desk))[0] is False, "a bill of what was let go of is still checked"


async def test_a_ledger_sets_aside_by_the_horizon_it_finds_and_says_how_far_it_is(desk: QuarantineDesk) -> None:
    async with desk.tables() as c:
        counts_from = hour(NOW - 40 * DAY)
        first_id = UUID(int=int(counts_from.timestamp() * 1000) << 80)
        await c.execute("UPDATE ledger_dedup SET counts_from = $1, first_id = $2", counts_from, first_id)
    await desk.produce([made(1), made(41), made(-1), replace(made(41), request_id=uuid4())], partition=PARTITION)
    ledger = desk.worker()
    await desk.caught_up()
    assert await desk.sums() == {"requests": 1, "items": 4}
    async with desk.tables() as c:
        kinds = [r["kind"] for r in await c.fetch('SELECT kind FROM dead_letters ORDER BY "offset"')]
    assert kinds == ["horizon", "future", "horizon"]
    assert health(ledger)["dedup"]["state"] == "starting"
