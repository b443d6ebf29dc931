"""A customer's spend cap at two gateways, on a real Redis and the ledger's real tables, written as a ledger does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI

from api.admission.caller import Caller as Calling
from api.admission.caller import Cap
from api.admission.demand import Spending
from api.errors import PaymentRequired, Unavailable
from api.limits.limiter import Limiter, RedisScript
from api.spend.confirmed import PostgresLedger
from api.spend.spend import Account, LedgerAway, month_of
from infra.kafka import partition_of_key
from infra.postgres import Connection, open_connection, open_pool
from infra.redis import Redis, open_redis
from infra.settings import operator_settings
from schemas.keys import RedisKeys, ledger_group
from schemas.topics import USAGE
from tests.conditions import eventually
from tests.fakes import demand
from tests.integration.api_desk import Caller, Desk, Reply, calling, open_desk, run, start_gateway
from tests.spending import BEGAN, Time

ITEM_MICROS = 100
VIEW_S = 60
UNKNOWN = "what was spent this month is not known"


@dataclass
class Ledger:
    """What a ledger writes of one customer."""

    env: Mapping[str, str]
    connection: Connection
    customer_id: str
    settled_at: datetime | None = None

    async def counts(self, items: int, *, price_id: str = "standard-v1", hour: datetime | None = None) -> None:
        """Usage of so many items, in this hour unless another is named."""
        hour = (hour or datetime.now(timezone.utc)).replace(minute=0, second=0, microsecond=0)
        await self.connection.execute(
            "INSERT INTO usage_hourly "
            "SELECT $1, $2, 'digits', $3, $4, meter, $5 FROM unnest(ARRAY['requests', 'items']) AS meter "
            "ON CONFLICT (customer_id, hour, model, version, price_id, meter) "
            "DO UPDATE SET quantity = usage_hourly.quantity + excluded.quantity",
            self.customer_id,
            hour,
            "a" * 64,
            price_id,
            items,
        )

    async def says(self, complete_until: datetime | None, *, ago_s: float = 0.0) -> None:
        """Up to when it is complete, told so long ago."""
        self.settled_at = complete_until
        namespace = self.env["INFERLOG_NAMESPACE"]
        topic = USAGE.in_namespace(namespace)
        await self.connection.execute(
            "INSERT INTO usage_watermarks VALUES ($1, $2, $3, $4, now() - $5::interval) "
            "ON CONFLICT (consumer_group, topic, partition) "
            "DO UPDATE SET complete_until = excluded.complete_until, seen_at = excluded.seen_at",
            ledger_group(namespace),
            topic.name,
            partition_of_key(self.customer_id.encode(), topic.partitions),
            complete_until,
            timedelta(seconds=ago_s),
        )


@dataclass
class World:
    """Gateways, a customer with a cap, the ledger, and Redis."""

    desk: Desk
    callers: list[Caller]
    ledger: Ledger
    redis: Redis

    async def at_once(self, calls: int) -> list[Reply]:
        """So many calls, as many to each gateway."""
        return list(await asyncio.gather(*(self.callers[n % len(self.callers)].infer() for n in range(calls))))

    async def settled(self) -> None:
        """The ledger is past everything until now."""
        await self.ledger.says(datetime.now(timezone.utc))

    async def answers(
        self,
        status: int,
        words: str = "",
        *,
        items: int = 1,
        at: int = 0,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
    ) -> Reply:
        """The first answer with these; gateways follow the ledger, and changes of customers, within a second or so."""

        async def found() -> Reply:
            if meanwhile is not None:
                await meanwhile()
            reply = await self.callers[at].infer(items)
            assert (reply.status, words in reply.text) == (status, True), reply
            return reply

        return await eventually(found, what=f"an answer with {status} {words}")

    def cap(self, micros: int) -> None:
        """Change the cap."""
        amount = f"{micros / 1e6:.6f}"
        command = ["customers", "cap", self.ledger.customer_id, "--per-month", amount, "--currency", "usd", "--json"]
        run(self.ledger.env, *command)

    async def forget(self) -> None:
        """Everything that Redis has of this installation is lost."""
        async for key in self.redis.scan_iter(match=f"{self.ledger.env['INFERLOG_NAMESPACE']}.*"):
            await self.redis.delete(key)


@asynccontextmanager
async def open_world(spawn: Any, env: Mapping[str, str], *, calls: int, gateways: int = 1) -> AsyncIterator[World]:
    """The cap is for so many calls of one item."""
    settings = operator_settings(env)
    view = {"INFERLOG_SPEND_VIEW_S": str(VIEW_S)}
    async with (
        open_desk(spawn, env, **view) as desk,
        open_connection(settings.postgres) as connection,
        open_redis(settings.redis) as redis,
    ):
        ledger = Ledger(env, connection, desk.acme["customer_id"])
        callers = [desk.caller]
        async with AsyncExitStack() as stack:
            for _ in range(gateways - 1):
                other = calling(start_gateway(spawn, env, **view), desk.acme["key"])
                callers.append(await stack.enter_async_context(other))
            world = World(desk, callers, ledger, redis)
            world.cap(calls * ITEM_MICROS)
            yield world


async def test_a_burst_at_two_gateways_gets_exactly_what_the_cap_allows_and_a_flush_adds_nothing(
    env: dict[str, str], spawn: Any
) -> None:
    async with open_world(spawn, env, calls=10, gateways=2) as world:
        # Nobody has said anything yet, and nothing is known of what was reserved.
        await world.answers(503, UNKNOWN)
        await world.answers(200, meanwhile=world.settled)
        replies = await world.at_once(50)
        assert Counter(r.status for r in replies) == {200: 9, 402: 41}
        assert [r.reserved_micros for r in world.desk.seen] == [ITEM_MICROS] * 10
        refused = next(r for r in replies if r.status == 402)
        month = month_of(datetime.now(timezone.utc))
        for word in ("0.001 USD", f"{month:%Y-%m}", "0.00 is spent", "0.001", "0.0001", "higher cap"):
            assert word in refused.text

        # Four of the ten cost less than was reserved: nothing. Redis forgets, and the ledger is not past that yet.
        await world.ledger.counts(6)
        await world.forget()
        assert {r.status for r in await world.at_once(20)} == {503}
        await world.answers(200, meanwhile=world.settled)
        await world.answers(200, at=1)  # each hears of it by itself
        assert Counter(r.status for r in await world.at_once(30)) == {200: 2, 402: 28}

        # All of it is counted: nothing is left, and nobody has to ask Redis for that.
        await world.ledger.counts(4)
        await world.settled()
        await eventually(lambda: _spent(world), what="the gateways to know")
        assert len(world.desk.seen) == 14
        world.cap(11 * ITEM_MICROS)
        await world.answers(200, meanwhile=world.settled)
        assert {r.status for r in await world.at_once(4)} == {402}


async def _refused_takes_nothing(world: World) -> None:
    """A key's limit, a customer's of one model, a place and money, each of them the one that does not reach."""
    env, acme = world.ledger.env, world.desk.acme
    keys = RedisKeys(namespace=env["INFERLOG_NAMESPACE"])
    names = [
        *(keys.bucket(acme["customer_id"], b) for b in (f"key:{acme['key_id']}:items", "model:digits:items")),
        *(keys.bucket(acme["customer_id"], b) for b in (f"customer:{acme['customer_id']}", f"key:{acme['key_id']}")),
    ]
    place, money = keys.places(acme["customer_id"], f"key:{acme['key_id']}"), keys.money(acme["customer_id"])

    async def taken() -> list[Any]:
        held = await world.redis.zrange(place, 0, -1, withscores=True)
        return [*[await world.redis.get(name) for name in names], held, await world.redis.hgetall(money)]

    async def refused(items: int, status: int, words: str) -> None:
        before = await taken()
        reply = await world.callers[0].infer(items)
        assert (reply.status, words in reply.text) == (status, True), reply
        # What is full again has no key; it may have come to that meanwhile.
        assert all(now in (was, None) for was, now in zip(before, await taken(), strict=True))

    await world.answers(200, meanwhile=world.settled)
    # A day gives back nothing while the test runs; the base rates are slow enough to be seen.
    common = ["--requests-per-s", "1", "--burst", "1000"]
    key_limits = ["keys", "limits", acme["key_id"], *common, "--limit", "items=1/1d,burst=30", "--max-concurrent", "2"]
    run(env, *key_limits, "--json")
    limits = ["customers", "limits", acme["customer_id"], *common, "--limit", "items=1/1d,burst=20,model=digits"]
    run(env, *limits, "--json")
    await world.answers(400, "20 items", items=31)
    assert (await world.callers[0].infer(15)).status == 200
    assert None not in await taken()

    await refused(6, 429, "20 at once")
    await world.redis.zadd(place, {"one": 2**53, "another": 2**53})  # two requests that have not ended
    await refused(1, 429, "unfinished requests")
    await world.redis.delete(place)
    assert world.ledger.settled_at is not None
    since = int(world.ledger.settled_at.timestamp())
    reserved = sum(int(v) for k, v in (await world.redis.hgetall(money)).items() if k.isdigit() and int(k) >= since)
    world.cap(reserved + ITEM_MICROS + ITEM_MICROS // 2)
    await world.answers(402, "requests of the last seconds", items=2)
    await refused(2, 402, "requests of the last seconds")
    assert (await world.callers[0].infer(1)).status == 200


async def test_hours_that_are_closed_are_summed_now_and_then_and_others_every_time(env: dict[str, str]) -> None:
    settings, time = operator_settings(env), Time()
    async with open_connection(settings.postgres) as connection, open_pool(settings.postgres) as pool:
        read = PostgresLedger(pool, namespace=env["INFERLOG_NAMESPACE"], clock=time.clock, now=time.now)
        ledger, other = Ledger(env, connection, "cust_a"), Ledger(env, connection, "cust_b")
        accounts = [Account(customer_id=c, currency="usd", since=month_of(BEGAN)) for c in ("cust_a", "cust_b", "none")]
        closed, open_hour = BEGAN - timedelta(hours=3), BEGAN - timedelta(minutes=30)

        async def spent() -> list[int]:
            return [found.spent_micros for found in await read.confirmed(accounts, within_s=5)]

        # As long as nobody says that the ledger is past an hour, it is not closed.
        for _ in range(2):
            await ledger.counts(1, hour=closed)
            await other.counts(10, hour=open_hour)
        assert await spent() == [2 * ITEM_MICROS, 20 * ITEM_MICROS, 0]
        await ledger.says(BEGAN - timedelta(seconds=14), ago_s=3)
        await ledger.counts(1, hour=closed)
        found = await read.confirmed(accounts, within_s=5)
        assert [f.spent_micros for f in found] == [3 * ITEM_MICROS, 20 * ITEM_MICROS, 0]
        assert found[0].settled_at == BEGAN - timedelta(seconds=14)
        assert 3 <= found[0].said_age_s < 3 + VIEW_S
        await ledger.counts(1, hour=closed)
        await ledger.counts(100, hour=open_hour)
        assert (await spent())[0] == 103 * ITEM_MICROS
        time.s = 300.0
        assert (await spent())[0] == 104 * ITEM_MICROS

        # Neither another month, nor another currency; and what nobody priced is told for as long as it is so.
        april = Account(customer_id="cust_a", currency="usd", since=accounts[0].until)
        euros = Account(customer_id="cust_a", currency="eur", since=accounts[0].since)
        assert [f.spent_micros for f in await read.confirmed([april, euros], within_s=5)] == [0, 0]
        await ledger.counts(1, price_id="made-up", hour=closed)
        time.s = 600.0
        assert [(await read.confirmed(accounts[:1], within_s=5))[0].unpriced for _ in range(2)] == ["made-up"] * 2
        with pytest.raises(LedgerAway):
            await read.confirmed(accounts, within_s=0)


async def test_a_server_that_was_started_again_is_not_trusted_with_what_it_remembers(env: dict[str, str]) -> None:
    """It may have come back with an earlier state, and lacks what was reserved since."""
    settings, now = operator_settings(env), datetime.now(timezone.utc)
    keys = RedisKeys(namespace=settings.redis.namespace)
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        limiter = Limiter(RedisScript(redis, within_s=5.0), keys)

        async def take(settled_at: datetime) -> None:
            spending = Spending(left_micros=1000, settled_at=settled_at, cost_micros=400, resets_at=now)
            caller = Calling(customer_id="c", key_id="k", limits=(), cap=Cap(amount_micros=1000, currency="usd"))
            await limiter.take(replace(demand("c", "k", ()), caller=caller, spending=spending))

        await take(now + timedelta(seconds=30))
        assert await redis.hset(keys.money("c"), "since", int(now.timestamp()) - 60) == 0
        await take(now)
        with pytest.raises(PaymentRequired):
            await take(now)
        run_id = (await redis.info("server"))["run_id"].encode()
        assert await redis.hget(keys.money("c"), "run") == run_id
        await redis.hset(keys.money("c"), "run", "another")
        with pytest.raises(Unavailable, match="not known"):
            await take(now)
        assert await redis.hget(keys.money("c"), "run") == run_id


async def _spent(world: World) -> bool:
    return all(["0.001 is spent" in (await caller.infer()).text for caller in world.callers])


async def test_what_is_not_known_is_refused_and_only_to_those_with_a_cap(env: dict[str, str], spawn: Any) -> None:
    async with open_world(spawn, env, calls=100) as world:
        await world.answers(503, UNKNOWN)
        await world.answers(200, meanwhile=world.settled)

        # A ledger that has stopped is gone by until its word is as old as stated.
        await world.ledger.says(datetime.now(timezone.utc), ago_s=VIEW_S - 6)
        await world.answers(200)
        await world.ledger.says(datetime.now(timezone.utc), ago_s=VIEW_S + 1)
        refused = await world.answers(503, UNKNOWN)
        assert "last heard of" in refused.text
        assert int(refused.headers["Retry-After"]) >= 1
        await world.settled()
        await world.answers(200)

        # Usage of last month and in another currency is no part of it; usage that nobody priced makes it unknown.
        before = month_of(datetime.now(timezone.utc)) - timedelta(hours=1)
        await world.ledger.counts(10**9, hour=before)
        run(env, "prices", "publish", "euro-v1", "--meter", "items=100000000", "--currency", "eur", "--json")
        await world.ledger.counts(10**9, price_id="euro-v1")
        await world.settled()
        await asyncio.gather(world.answers(200), world.answers(200))
        await world.ledger.counts(1, price_id="made-up")
        assert "made-up" in (await world.answers(503, UNKNOWN)).text
        run(env, "prices", "publish", "made-up", "--meter", "requests=1", "--currency", "usd", "--json")
        await world.answers(200)

        # A client that repeats calls by itself does not repeat this one.
        world.cap(0)
        refused = await world.answers(402, "is reached")
        asked: list[httpx.Request] = []

        async def note(request: httpx.Request) -> None:
            asked.append(request)

        async with httpx.AsyncClient(event_hooks={"request": [note]}) as http:
            client = AsyncOpenAI(
                api_key=world.desk.acme["key"], base_url=f"{world.callers[0].url}/v1", max_retries=3, http_client=http
            )
            with pytest.raises(APIStatusError) as error:
                await client.embeddings.create(model="texts", input="some words")
        assert (error.value.status_code, error.value.code, len(asked)) == (402, "spend_cap_reached", 1)
        run(env, "customers", "cap", world.ledger.customer_id, "--none", "--json")
        await world.answers(200)
        world.cap(1000 * ITEM_MICROS)
        await _refused_takes_nothing(world)
