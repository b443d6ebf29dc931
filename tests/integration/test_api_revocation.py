"""A revoked key is refused within a second by every gateway, and no key is ever seen in what a gateway writes."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any

from api.access.key_shape import _checksum, digest, mint
from infra.postgres import open_connection
from infra.redis import open_redis
from infra.settings import operator_settings
from schemas.keys import RedisKeys
from tests.conditions import eventually
from tests.integration.api_desk import Caller, calling, customer, open_desk, run, start_gateway

#: After revoked_at, by the clock of Postgres and that of the limiter, which are one here.
WITHIN = timedelta(seconds=1)


async def test_a_revoked_key_is_refused_within_a_second_by_processes_that_serve_it(
    env: dict[str, str], spawn: Any
) -> None:
    """Three keys in turn: one revoked as ever, one while Redis loses what it was told, one past the command."""
    async with open_desk(spawn, env) as desk, AsyncExitStack() as stack:
        second = start_gateway(spawn, env)
        callers = [desk.caller, await stack.enter_async_context(calling(second, None))]
        settings = operator_settings(env)
        redis = await stack.enter_async_context(open_redis(settings.redis))
        names = RedisKeys(namespace=settings.redis.namespace)
        revoked_set = names.revoked_keys(desk.acme["customer_id"])
        ended: dict[str, datetime] = {}
        for how in ("as ever", "redis loses it", "postgres alone"):
            key = run(env, "keys", "create", "Acme", "--json")
            heard: list[list[str]] = [[] for _ in callers]
            served = [
                asyncio.ensure_future(_until_refused(c.with_key(key["key"]), answers))
                for c, answers in zip(callers, heard, strict=True)
            ]
            await eventually(lambda heard=heard: all("200" in answers for answers in heard), what="both serve the key")
            if how == "postgres alone":
                row = await _revoke_by_hand(env, key["key_id"])
                ended[key["key_id"]] = row
            else:
                done = await asyncio.to_thread(run, env, "keys", "revoke", key["key_id"], "--json")
                ended[key["key_id"]] = datetime.fromisoformat(done["revoked_at"])
            if how == "redis loses it":
                await redis.delete(revoked_set, names.revoked_whole())  # as far as this test's part of it goes
            await asyncio.gather(*served)
            for answers in heard:
                assert answers[-1] == "revoked_api_key" and "200" in answers, how
            assert how == "as ever" or await eventually(
                lambda key=key: redis.sismember(revoked_set, key["key_id"]), what="gateways put it into the set again"
            )
        late = [
            (r.key_id, r.limiter_time - ended[r.key_id])
            for r in desk.seen
            if r.key_id in ended and r.limiter_time > ended[r.key_id] + WITHIN
        ]
        assert not late


async def _until_refused(caller: Caller, answers: list[str]) -> None:
    """Status after status of one caller that asks again at once, and the code of its refusal last."""

    async def refused() -> bool:
        reply = await caller.call("POST", "/v1/embeddings", {"model": "texts", "input": "x"})
        answers.append(str(reply.status) if reply.status != 401 else reply.json["error"]["code"])
        return reply.status == 401

    await eventually(refused, what="the key is refused")


async def _revoke_by_hand(env: dict[str, str], key_id: str) -> datetime:
    async with open_connection(operator_settings(env).postgres) as connection:
        at: datetime = await connection.fetchval(
            "UPDATE api_keys SET revoked_at = clock_timestamp() WHERE key_id = $1 RETURNING revoked_at", key_id
        )
    return at


async def test_no_key_is_seen_in_logs_answers_or_records(env: dict[str, str], spawn: Any) -> None:
    """A run with good, forged, unknown, revoked, scoped and malformed keys, everything logged that can be."""
    chance = random.Random(7)
    async with open_desk(spawn, env, INFERLOG_LOG_LEVEL="DEBUG") as desk:
        good = desk.acme["key"]
        scoped = customer(env, "Brook")
        run(env, "keys", "scope", scoped["key_id"], "--models", "texts", "--operations", "infer", "--json")
        gone = run(env, "keys", "create", "Acme", "--json")
        run(env, "keys", "revoke", gone["key_id"], "--json")
        unknown = mint("test").secret
        at = chance.randrange(25, 60)
        malformed = good[:at] + ("x" if good[at] != "x" else "y") + good[at + 1 :]
        start = good[:21] + unknown[21:-8]
        forged = start + _checksum(start)
        said: list[str] = []
        for key, status in (
            (good, 200), (scoped["key"], 403), (gone["key"], 401), (unknown, 401), (malformed, 401), (forged, 401),
            (good + good, 401), (good.upper(), 401),
        ):  # fmt: skip
            caller = desk.caller.with_key(key)
            reply = await caller.infer()
            assert reply.status == status, reply.text
            said += [reply.text, str(dict(reply.headers)), (await caller.call("GET", "/v1/usage")).text]
            said.append((await caller.call("POST", "/v1/embeddings", b"{")).text)
        said += [repr(r) for r in desk.seen]
        log = desk.gateway.process.log.read_bytes()
        assert b"listening" in log
        written = log + "".join(said).encode()
        for key in (good, scoped["key"], gone["key"], unknown, malformed):
            secret = key[len("il_test_") + 13 :]
            for trace in (key, secret[:43], secret[:12], digest(key).hex(), repr(digest(key))[2:-1]):
                assert trace.encode() not in written
