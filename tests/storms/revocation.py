"""`make revocation-proof`: gateways serve a key among others, and `inferlog keys revoke` ends it, over and over.

Judged from the request topic: how long after `revoked_at` each process last admitted the key, on the limiter's clock
(one machine, so the clock of Postgres as well). In every other round Redis is flushed as soon as it hears of the key,
so that only what a process reads from Postgres can refuse it. Exits 1 when an admission came more than a second late.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import click

from api.access.key_shape import mint
from api.operators.customers import create_customer
from api.operators.keyring import create_key
from infra.actor import Author
from infra.postgres import open_connection
from infra.redis import Redis, open_redis
from schemas.codec import decode_at
from schemas.keys import RedisKeys
from schemas.records import InferenceRequested
from schemas.topics import requests_topic
from streams.log import open_log
from tests.integration.api_desk import API, TEXTS, echo_worker, register, run
from tests.processes import Process, free_port
from tests.storms.ground import Ground, Say, Timeline, open_ground, storm

WITHIN = timedelta(seconds=1)
_CUSTOMER = "cust_storm"
_OTHERS = 20
#: Of each gateway: some callers with the key that is revoked, the others with other keys.
_CALLERS, _VICTIMS = 10, 4
_BEFORE_S, _AFTER_S = 1.0, 1.6
_BODY = json.dumps({"model": "texts", "input": "revoked or not"}).encode()


@dataclass(slots=True)
class Round:
    """One revocation: the key, when it was revoked, and what its callers were answered at each gateway."""

    key_id: str
    flushed: bool
    revoked_at: datetime
    flushes: int = 0
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)


@dataclass(slots=True)
class Load:
    """Callers at a steady pace. `victim` is the key that the first callers of each gateway use; None: they pause."""

    urls: dict[str, str]
    others: list[str]
    per_s: float
    victim: str | None = None
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)

    async def call(self, session: aiohttp.ClientSession, gateway: str, number: int) -> None:
        """One caller, for ever."""
        loop, period_s = asyncio.get_running_loop(), len(self.urls) * _CALLERS / self.per_s
        due_s = loop.time() + period_s * (number / _CALLERS)
        turn = number
        while True:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            due_s = max(due_s + period_s, loop.time())
            turn += 1
            key = self.victim if number < _VICTIMS else self.others[turn % len(self.others)]
            if key is None:
                continue
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(self.urls[gateway] + "/v1/embeddings", data=_BODY, headers=headers) as answer:
                await answer.read()
            self.statuses[answer.status] += 1
            if number < _VICTIMS and key == self.victim:
                self.answers[gateway, answer.status] += 1


@asynccontextmanager
async def gateways(ground: Ground, count: int) -> AsyncIterator[dict[str, str]]:
    """Processes that are ready: their addresses by their names."""
    running: list[Process] = []
    urls: dict[str, str] = {}
    try:
        for number in range(count):
            name, port = f"gateway-{number}", free_port()
            env = {**ground.env, "INFERLOG_API_PORT": str(port), "INFERLOG_API_INSTANCE": name}
            running.append(Process(API, env, ground.logs / f"{name}.log"))
            urls[name] = f"http://127.0.0.1:{port}"
        for process, url in zip(running, urls.values(), strict=True):
            await asyncio.to_thread(process.wait_ready, url + "/readyz")
        yield urls
    finally:
        for process in running:
            process.end()


async def make_keys(ground: Ground, count: int) -> list[tuple[str, str]]:
    """Keys of the customer: their ids and what is sent."""
    made = []
    async with open_connection(ground.settings.postgres) as connection:
        for _ in range(count):
            minted = mint(ground.settings.environment)
            rates = {"requests_per_s": 100_000, "burst": 100_000}
            by = Author(actor="storm")
            await create_key(connection, minted, customer_id=_CUSTOMER, label="", lifetime=None, by=by, **rates)
            made.append((minted.key_id, minted.secret))
    return made


async def forget(redis: Redis, name: str, until: asyncio.Event) -> int:
    """Flush Redis whenever it has heard of a revocation; how often that was."""
    flushes = 0
    while not until.is_set():
        if await redis.scard(name):
            await redis.flushdb()
            flushes += 1
        await asyncio.sleep(0.002)
    return flushes


async def one_round(ground: Ground, load: Load, redis: Redis, *, flushed: bool) -> Round:
    """Let a new key be served, revoke it by the command, and go on calling."""
    ((key_id, key),) = await make_keys(ground, 1)
    load.answers.clear()
    load.victim = key
    await asyncio.sleep(_BEFORE_S)
    name, over = RedisKeys(namespace=ground.settings.redis.namespace).revoked_keys(_CUSTOMER), asyncio.Event()
    forgetting = asyncio.ensure_future(forget(redis, name, over)) if flushed else None
    try:
        said = await asyncio.to_thread(run, ground.env, "keys", "revoke", key_id, "--reason", "a storm", "--json")
        await asyncio.sleep(_AFTER_S)
    finally:
        load.victim = None
        over.set()
    return Round(
        key_id=key_id,
        flushed=flushed,
        revoked_at=datetime.fromisoformat(said["revoked_at"]),
        flushes=0 if forgetting is None else await forgetting,
        answers=Counter(load.answers),
    )


async def admissions(ground: Ground) -> list[InferenceRequested]:
    """Every request on the topic."""
    topic = requests_topic().in_namespace(ground.settings.kafka.namespace)
    found = []
    async with open_log(ground.settings.kafka) as reader:
        async for record in reader.read(topic.name, await reader.freeze(topic.name, topic.partitions)):
            found.append(decode_at(record, InferenceRequested))
    return found


async def storm_of(home: Path, *, rounds: int, processes: int, per_s: float, say: Say) -> dict[str, Any]:
    """All rounds, and what the topic says of them."""
    async with open_ground(home) as ground, AsyncExitStack() as stack:
        note = Timeline(say)
        await register(ground.env, "texts", TEXTS)
        async with open_connection(ground.settings.postgres) as connection:
            rates = {"requests_per_s": 100_000, "burst": 100_000}
            await create_customer(connection, customer_id=_CUSTOMER, name="Storm", by=Author(actor="storm"), **rates)
        others = [key for _, key in await make_keys(ground, _OTHERS)]
        await stack.enter_async_context(echo_worker(ground.env))
        urls = await stack.enter_async_context(gateways(ground, processes))
        redis = await stack.enter_async_context(open_redis(ground.settings.redis, timeout_s=5.0))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        load = Load(urls=urls, others=others, per_s=per_s)
        calling = [asyncio.ensure_future(load.call(session, name, n)) for name in urls for n in range(_CALLERS)]
        note.begin()
        done = []
        try:
            for number in range(rounds):
                done.append(await one_round(ground, load, redis, flushed=number % 2 == 1))
                for task in (t for t in calling if t.done()):
                    task.result()
        finally:
            seconds = note.seconds
            for task in calling:
                task.cancel()
            await asyncio.gather(*calling, return_exceptions=True)
        found = await admissions(ground)
    return judged(done, found, list(urls), load, seconds=seconds, note=note)


def judged(
    rounds: Sequence[Round],
    found: Sequence[InferenceRequested],
    gateways: Sequence[str],
    load: Load,
    *,
    seconds: float,
    note: Timeline,
) -> dict[str, Any]:
    """The figures: milliseconds from `revoked_at` to the last admission of each process in each round."""
    last: dict[tuple[str, str], datetime] = {}
    for request in found:
        place = (request.key_id, request.reply_to)
        last[place] = max(last.get(place, request.limiter_time), request.limiter_time)
    late, unproved = 0, 0
    after_ms: dict[bool, dict[str, list[float]]] = {f: {g: [] for g in gateways} for f in (False, True)}
    for one in rounds:
        for gateway in gateways:
            if (one.key_id, gateway) not in last or not one.answers[gateway, 401]:
                note(f"WRONG {one.key_id} was not served, or not refused, by {gateway}: {dict(one.answers)}")
                unproved += 1
                continue
            after = last[one.key_id, gateway] - one.revoked_at
            late += after > WITHIN
            after_ms[one.flushed][gateway].append(after / timedelta(milliseconds=1))
    for is_flushed, by_gateway in after_ms.items():
        note("Redis flushed" if is_flushed else "Redis as ever")
        for gateway, values in by_gateway.items():
            note(f"  {gateway}  {figures(values)}")
    every = {f: [v for values in by.values() for v in values] for f, by in after_ms.items()}
    return {
        "revocations": len(rounds),
        "processes": len(gateways),
        "calls_per_s": round(sum(load.statuses.values()) / seconds, 1),
        "statuses": dict(load.statuses),
        "admissions": len(found),
        "flushes": sum(one.flushes for one in rounds),
        "last_admission_after_ms": {"redis": figures(every[False]), "feed_alone": figures(every[True])},
        "later_than_1_s": late,
        "held": not late and not unproved,
    }


def figures(values: Sequence[float]) -> dict[str, float]:
    """Their distribution; negative when the last admission came before the revocation."""
    if len(values) < 2:
        return {"count": len(values)}
    ninths = statistics.quantiles(values, n=10)
    return {
        "count": len(values),
        "min": round(min(values), 1),
        "p50": round(statistics.median(values), 1),
        "p90": round(ninths[-1], 1),
        "max": round(max(values), 1),
    }


@click.command(epilog="Example:  python -m tests.storms.revocation --rounds 6")
@click.option("--rounds", default=24, show_default=True, help="Revocations; Redis is flushed in every other one.")
@click.option("--processes", default=4, show_default=True, help="Gateways.")
@click.option("--per-s", default=300.0, show_default=True, help="Calls per second, all together.")
@click.option("--keep", is_flag=True, help="Keep the folder with logs and tables for a look afterwards.")
def main(rounds: int, processes: int, per_s: float, keep: bool) -> None:
    """Revoke keys that gateways are serving, and look how long each went on."""
    found = storm(
        lambda home: storm_of(home, rounds=rounds, processes=processes, per_s=per_s, say=click.echo), keep=keep
    )
    click.echo(json.dumps(found))
    if not found["held"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
