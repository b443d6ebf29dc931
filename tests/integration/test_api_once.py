"""Calls that are sent again, at a gateway with the book of claims in Postgres and results on the log."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import orjson

from infra.postgres import open_connection
from infra.redis import open_redis
from infra.settings import operator_settings
from schemas.keys import RedisKeys
from tests.conditions import eventually
from tests.integration.api_desk import (
    DIGITS,
    Desk,
    calling,
    customer,
    echo_worker,
    open_desk,
    pixels,
    register,
    start_gateway,
)

BODY = {"inputs": [pixels()]}


async def sql(desk: Desk, statement: str, *args: Any) -> Any:
    async with open_connection(operator_settings(desk.gateway.env).postgres) as connection:
        return await connection.fetchval(statement, *args)


async def older(desk: Desk, interval: str, *columns: str) -> None:
    """As if all that the book holds had happened so much earlier."""
    await sql(desk, f"UPDATE claims SET {', '.join(f'{c} = {c} - $1::text::interval' for c in columns)}", interval)


async def accepted(desk: Desk) -> None:
    are = "SELECT coalesce(bool_and(accepted_at IS NOT NULL), false) FROM claims"
    await eventually(lambda: sql(desk, are), what="claims noted as accepted")


async def infer(desk: Desk, body: Any = None, **headers: Any) -> tuple[int, UUID, bool]:
    """One call: its status, the request that it was about, and whether it was told what an earlier one was."""
    reply = await desk.caller.call("POST", "/v2/models/digits/infer", body or BODY, **headers)
    return reply.status, UUID(reply.headers["x-request-id"]), reply.headers.get("Idempotent-Replayed") == "true"


async def test_a_key_outlives_the_gateway_and_redis_and_is_new_past_the_horizon(
    env: dict[str, str], spawn: Any
) -> None:
    keyed, other = {"Idempotency-Key": "k"}, {"inputs": [pixels(2)]}
    async with open_desk(spawn, env, INFERLOG_IDEMPOTENCY_HOURS="1") as desk:
        first = await infer(desk, **keyed)
        assert (first[0], first[2]) == (200, False)
        await accepted(desk)
        assert (await infer(desk, other, **keyed))[0] == 422
        desk.gateway.process.kill()
        settings = operator_settings(env)
        async with open_redis(settings.redis) as redis:
            assert await redis.delete(RedisKeys(namespace=settings.redis.namespace).result(first[1]))
        gateway = start_gateway(spawn, env, INFERLOG_IDEMPOTENCY_HOURS="1")
        async with calling(gateway, desk.acme["key"]) as desk.caller:
            assert await infer(desk, **keyed) == (200, first[1], True)
            # Past the horizon the key means nothing any more: the call runs, and is a request of its own.
            await older(desk, "1 hour", "entered_at", "seen_at")
            again = await infer(desk, other, **keyed)
            assert (again[0], again[1] != first[1], again[2]) == (200, True, False)
            assert len(desk.seen) == 2


async def test_equal_calls_beyond_a_keys_rate_are_requests_of_their_own(env: dict[str, str], spawn: Any) -> None:
    """Some are answered and some refused; a client that counts repeats the latter, as often as it takes."""
    async with open_desk(spawn, env) as desk:
        slow = customer(env, "Slow", requests_per_s=1, burst=1)
        desk.caller = desk.caller.with_key(slow["key"])
        calls = [await infer(desk, **{"x-stainless-retry-count": "0"}) for _ in range(4)]
        refused = [c for c in calls if c[0] == 429]
        assert refused
        passed = [c for c in calls if c[0] == 200]
        count = 0

        async def repeated() -> bool:
            nonlocal count
            told = "SELECT coalesce(bool_and(answered_at IS NOT NULL), true) FROM claims"
            await eventually(lambda: sql(desk, told), what="what became of the calls noted")
            count += 1
            reply = await infer(desk, **{"x-stainless-retry-count": str(count)})
            if reply[0] == 200:
                passed.append(reply)
            return reply[0] == 200

        for _ in refused:
            count = 0
            await eventually(repeated, what="room for the call")
        assert [is_replayed for _, _, is_replayed in passed] == [False] * len(calls)
        assert len({request_id for _, request_id, _ in passed}) == len(calls) == len(desk.seen)


async def test_a_call_whose_gateway_died_long_ago_is_run_unless_the_log_knows_its_end(
    env: dict[str, str], spawn: Any
) -> None:
    ages = ("admitted_at", "deadline_at", "entered_at", "seen_at")
    async with open_desk(spawn, env) as desk:
        # One that was accepted and has a result, though its gateway died before it noted either.
        ran = await infer(desk, **{"Idempotency-Key": "ran"})
        # And one of which nothing ever reached the log, once its id is another.
        await infer(desk, **{"Idempotency-Key": "never"})
        await accepted(desk)
        await sql(desk, "UPDATE claims SET accepted_at = NULL")
        lost = UUID("01890000-0000-7000-8000-000000000000")
        await sql(desk, "UPDATE claims SET request_id = $1 WHERE request_id <> $2", lost, ran[1])
        await older(desk, "20 seconds", *ages)
        settings = operator_settings(env)
        async with open_redis(settings.redis) as redis:
            await redis.delete(RedisKeys(namespace=settings.redis.namespace).result(ran[1]))
        assert await infer(desk, **{"Idempotency-Key": "ran"}) == (200, ran[1], True)
        status, request_id, is_replayed = await infer(desk, **{"Idempotency-Key": "never"})
        assert (status, is_replayed) == (200, False)
        assert request_id != lost
        assert len(desk.seen) == 3


async def test_an_answer_that_could_not_be_handed_over_does_not_count_as_told(env: dict[str, str], spawn: Any) -> None:
    """A caller that hung up is told much later; of one that was answered the next equal call is another."""
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env, INFERLOG_DEADLINE_S="30")
    async with calling(gateway, acme["key"]) as caller:
        desk = Desk(gateway, caller, acme, [])
        url = urlsplit(gateway.url)
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        body = orjson.dumps(BODY)
        writer.write(
            f"POST /v2/models/digits/infer HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {acme['key']}\r\n"
            f"x-stainless-retry-count: 0\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await accepted(desk)
        writer.close()
        await writer.wait_closed()
        async with echo_worker(env) as desk.seen:
            await eventually(lambda: desk.seen, what="its request")
            await older(desk, "1 minute", "seen_at", "answered_at")
            assert await infer(desk, body, **{"x-stainless-retry-count": "1"}) == (200, desk.seen[0].request_id, True)
            await eventually(lambda: sql(desk, "SELECT answered_at IS NOT NULL FROM claims"), what="an answer noted")
            await older(desk, "1 minute", "seen_at", "answered_at")
            status, request_id, is_replayed = await infer(desk, body, **{"x-stainless-retry-count": "2"})
            assert (status, request_id != desk.seen[0].request_id, is_replayed) == (200, True, False)
        assert len(desk.seen) == 2
