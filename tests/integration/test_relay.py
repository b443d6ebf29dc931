"""The outbox's relay on real servers: each fact on its topic once and in order, whatever dies, freezes or competes."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner

from infra.cli import cli
from infra.kafka import TopicPartition, open_consumer, open_producer
from infra.kafka_admin import open_admin
from infra.outbox import add_facts, first_waiting
from schemas.facts import PriceBookPublished, RouteChanged
from schemas.headers import EVENT_ID, SCHEMA
from schemas.topics import KEYS, MODELS, PRICES, ROUTES, Topic
from streams.outbox.standing import RETRY_S, Standing
from tests.conditions import eventually
from tests.fakes import Clock
from tests.integration.ledger_world import LedgerWorld, health, usages
from tests.integration.relay_world import STAMP, RelayWorld, frozen, price, route
from tests.processes import Process

Spawn = Callable[..., Process]


@pytest.fixture
def world(env: dict[str, str], spawn: Spawn) -> RelayWorld:
    return RelayWorld(env, spawn)


async def test_killed_between_the_change_and_its_publication(world: RelayWorld) -> None:
    await world.told()
    facts = [price("a"), price("b")]
    first = world.variant("freezes_before_publishing")
    await world.write(facts)
    await frozen(first)
    first.kill()
    assert await world.published() == []
    world.relay()
    await world.emptied()
    assert await world.published() == [f.event_id for f in facts]


async def test_killed_between_kafkas_commit_and_the_removal_among_records_of_others(world: RelayWorld) -> None:
    await world.told()
    name = PRICES.in_namespace(world.settings.kafka.namespace).name
    facts = [price("a"), price("b")]
    await world.write(facts)
    async with open_producer(world.settings.kafka) as other:
        await other.send(name, b"no record", partition=0, timeout_s=30)
        first = world.variant("freezes_before_removing")
        await frozen(first)
        first.kill()
        await other.send(name, b"\x00\x7f\xff\xff\xff!", partition=0, timeout_s=30)
        ours = str(facts[0].event_id).encode()
        for said in ([b"no id"], [b"\xff"], [None], [ours, ours], [ours, None]):
            headers: Any = [(EVENT_ID, value) for value in said]
            await other.send(name, b"?", key=b"k", partition=0, headers=headers, timeout_s=30)
    later = price("c")
    await world.write([later])
    world.relay()
    await world.emptied()
    assert await world.published() == [*(f.event_id for f in facts), later.event_id]
    assert await world.noted() == 11, "so the next look begins after these"


async def test_a_frozen_relay_is_succeeded_and_fenced_when_it_wakes(world: RelayWorld) -> None:
    await world.told()
    first = world.variant("freezes_before_publishing")
    facts = [price("a"), price("b")]
    await world.write(facts)
    await frozen(first)
    world.relay()
    await world.emptied()  # Postgres has taken the lock from the frozen one
    os.kill(first.pid, signal.SIGCONT)
    await eventually(lambda: "the outbox is held" in first.log.read_text(), what="the frozen relay failed on waking")
    assert await world.published() == [f.event_id for f in facts]
    assert "Fenced" in first.log.read_text()


async def test_relays_that_compete_and_are_killed_under_many_writers(world: RelayWorld) -> None:
    await world.told()
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")  # noqa: T201
    relays = [world.relay(), world.relay()]
    await eventually(world.active_session, what="an active relay")
    for part in range(3):
        before = await _count(world)
        writing = asyncio.create_task(world.write_many(70, writers=6, seed=seed + part))
        if part < 2:
            await eventually(lambda before=before: _grew(world, before), what="some of these facts on the topics")
            for relay in relays:
                relay.kill()
            relays = [world.relay(), world.relay()]
        written = await writing
    await world.emptied()
    assert sum(map(len, written.values())) >= 200
    for topic in (PRICES, ROUTES):
        assert await world.published(topic) == written[topic.name], f"{topic.name}, seed {seed}"
    for relay in relays:
        await eventually(lambda relay=relay: "the outbox" in relay.log.read_text(), what="active or standing by")
    assert sum("the relay publishes the outbox" in relay.log.read_text() for relay in relays) == 1
    for relay in relays:
        relay.terminate()
        assert relay.wait(10) == 0


async def _count(world: RelayWorld) -> int:
    return sum([len(await world.published(topic)) for topic in (PRICES, ROUTES)])


async def _grew(world: RelayWorld, before: int) -> bool:
    return await _count(world) > before


async def test_a_change_that_commits_later_comes_later(world: RelayWorld) -> None:
    await world.told()
    first, dropped, second = price("first"), price("dropped"), price("second")
    async with world.relaying(), world.tables() as a, world.tables() as b, world.tables() as c:
        early = a.transaction()
        await early.start()
        await add_facts(a, PRICES, [("k", first)], stamp=STAMP)

        async def change(connection, fact, end):  # type: ignore[no-untyped-def]
            transaction = connection.transaction()
            await transaction.start()
            await add_facts(connection, PRICES, [("k", fact)], stamp=STAMP)
            await getattr(transaction, end)()

        late = [asyncio.create_task(change(b, dropped, "rollback")), asyncio.create_task(change(c, second, "commit"))]

        async def later_ones_wait_or_are_through() -> bool:
            async with world.tables() as other:
                waiting = await other.fetchval(
                    "SELECT count(*) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND wait_event = 'advisory'"
                )
            return waiting == 2 or all(t.done() for t in late)

        await eventually(later_ones_wait_or_are_through)
        if all(t.done() for t in late):  # without the order lock the relay would publish it now
            await world.emptied()
        await early.commit()
        await asyncio.gather(*late)
        await world.emptied()
    assert await world.published() == [first.event_id, second.event_id]


async def test_what_kafka_refuses_blocks_its_topic_alone_and_is_said(
    world: RelayWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    await world.told()
    namespace = world.settings.kafka.namespace
    nowhere, narrow = (
        Topic(name=f"inference.{n}.v1", key="k", record=RouteChanged, partitions=1, retention_ms=-1, why="")
        for n in ("nowhere", "narrow")
    )
    async with open_admin(world.settings.kafka) as admin:
        await admin.create_topics([replace(narrow.in_namespace(namespace), max_message_bytes=10_000)])
    huge, wide, behind, lost = (
        route("m", reason="x" * 9_000_000),
        route("m", reason="x" * 20_000),
        route("m"),
        route("m"),
    )
    async with world.tables() as c:
        for name, size, headers in (
            ("no name!", 1, {}),
            (KEYS.name, 9_000_000, {}),
            (MODELS.name, 1, {"h": "x" * 9_000_000}),
        ):
            await c.execute(
                "INSERT INTO outbox (event_id, topic, key, value, headers) VALUES (gen_random_uuid(), $1, $2, 'v', $3)",
                name,
                bytes(size),
                json.dumps(headers),
            )
    before, free = [route("m") for _ in range(9)], [price(str(n)) for n in range(9)]
    await world.write(before, topic=ROUTES)
    await world.write([huge, behind], topic=ROUTES)
    await world.write([lost], topic=nowhere)
    fitting = [route("m") for _ in range(5)]
    await world.write([*fitting, wide, route("m")], topic=narrow)
    await world.write(free)
    async with world.relaying(Standing(clock=clock)) as relay:

        async def all_but_the_blocked_are_out() -> bool:
            return len(await world.published(PRICES)) == len(free) and len(relay.standing.figures()["blocked"]) == 6

        await eventually(all_but_the_blocked_are_out)
        blocked = relay.standing.figures()["blocked"]
        assert "MessageSizeTooLarge" in blocked[ROUTES.name] and "inferlog provision" in blocked[nowhere.name]
        for name in (narrow.name, KEYS.name, MODELS.name):
            assert "MessageSizeTooLarge" in blocked[name]
        assert "there is no topic" in blocked["no name!"]
        assert str(huge.event_id) in caplog.text and str(wide.event_id) in caplog.text
        assert await world.published(narrow) == [f.event_id for f in fitting]
        assert await world.published(ROUTES) == [f.event_id for f in before]
        monkeypatch.setattr("os.environ", {**os.environ, **world.env})
        listed = await asyncio.to_thread(CliRunner().invoke, cli, ["outbox", "list", "--json"], catch_exceptions=False)
        said = json.loads(listed.output)
        problems = {t["topic"]: (t["waiting"], t["problem"]) for t in said["topics"]}
        assert said["relay"]["pid"] == await world.active_session()
        assert problems[nowhere.name] == (1, "the topic does not exist; create it:  inferlog provision")
        assert problems[ROUTES.name][0] == 2 and "takes records of 8388608" in problems[ROUTES.name][1]
        async with world.tables() as c:  # what an operator decides
            await c.execute("DELETE FROM outbox WHERE event_id = ANY ($1)", [huge.event_id, wide.event_id])
            await c.execute("DELETE FROM outbox WHERE value = 'v'")
        async with open_admin(world.settings.kafka) as admin:
            await admin.create_topics([nowhere.in_namespace(namespace)])
        clock.now_s += RETRY_S
        await world.emptied()
        assert await world.published(ROUTES) == [*(f.event_id for f in before), behind.event_id]
        assert await world.published(nowhere) == [lost.event_id]
        await eventually(lambda: relay.standing.figures()["blocked"] == {})


async def test_headers_that_cannot_be_sent_are_refused_and_none_hides_the_id(world: RelayWorld) -> None:
    add = "INSERT INTO outbox (event_id, topic, key, value, headers) VALUES (gen_random_uuid(), $1, 'k', 'v', $2)"
    await world.told()
    async with world.tables() as c:
        for headers in (
            "null",
            "[]",
            '"x"',
            "3",
            '["inferlog.schema"]',
            '{"a": 1}',
            '{"a": null}',
            '{"a": {"b": "c"}}',
        ):
            with pytest.raises(asyncpg.CheckViolationError):
                await c.execute(add, PRICES.name, headers)
        for headers in ("{}", '{"a": "b"}', json.dumps({EVENT_ID: "another"})):
            await c.execute(add, PRICES.name, headers)
        (*_, last) = await first_waiting(c, rows=10, size_bytes=10_000)
        assert last.headers == [(EVENT_ID, str(last.event_id).encode())], "or its record would not be recognised"
    async with world.relaying():
        await world.emptied()
    assert await world.noted() == 3


async def test_the_ledgers_process_relays_and_its_headers_tell_a_lone_record(env: dict[str, str], spawn: Spawn) -> None:
    world, ledger = RelayWorld(env, spawn), LedgerWorld(env, spawn)
    worker = ledger.worker()
    fact = price("a")
    await world.write([fact])
    await ledger.produce(usages(10))
    await world.emptied()
    await ledger.caught_up()
    figures = health(worker)["outbox"]
    assert (figures["state"], figures["published"], figures["blocked"]) == ("active", 2, {})  # with the seeded price
    assert (await world.published())[1:] == [fact.event_id]
    async with world.tables() as c:  # the relay loses its session, the ledger notices nothing
        await c.execute("SELECT pg_terminate_backend($1)", await world.active_session())
    await world.write([price("b")])
    await world.emptied()
    await ledger.produce(usages(10))
    await ledger.caught_up()
    assert worker.returncode is None
    name = PRICES.in_namespace(world.settings.kafka.namespace).name
    async with open_consumer(world.settings.kafka, group=None) as consumer:
        consumer.assign([TopicPartition(name, 0)])
        record = await consumer.getone()
    assert dict(record.headers)[SCHEMA] == PriceBookPublished.SCHEMA.encode()
