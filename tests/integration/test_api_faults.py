"""What callers see when something behind the gateway is away: a prompt 503, never a hang, recovery without a restart.

The deadline of these gateways is 60 s, so an answer within the callers' own 10 s shows that the outage was noticed.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from infra.local.stack import Stack
from infra.redis import open_redis
from infra.settings import operator_settings
from tests.conditions import eventually
from tests.fakes import manifest
from tests.integration.api_desk import (
    DIGITS,
    Caller,
    Desk,
    Reply,
    calling,
    customer,
    echo_worker,
    open_desk,
    register,
    start_gateway,
)

PROMPT_S = 10.0
LONG = {"INFERLOG_DEADLINE_S": "60"}


@asynccontextmanager
async def away(stack: Stack, part: str, how: str) -> AsyncIterator[None]:
    """The part is stopped, or frozen with its connections open, inside the block."""
    if how == "stopped":
        await asyncio.to_thread(stack.stop_part, part, kill=True)
    else:
        stack.pause_part(part)
    try:
        yield
    finally:
        if how == "stopped":
            await asyncio.to_thread(stack.start_part, part)
        else:
            stack.resume_part(part)


async def refused_in(desk: Desk) -> Reply:
    """The first answer that is not a success; all until then were prompt."""

    async def refusal() -> Reply | None:
        reply = await desk.caller.infer(timeout_s=PROMPT_S)
        return reply if reply.status != 200 else None

    reply = await eventually(refusal)
    assert reply is not None
    return reply


async def works_again(caller: Caller) -> None:
    async def works() -> bool:
        return (await caller.infer(timeout_s=PROMPT_S)).status == 200

    await eventually(works, timeout_s=60)


@pytest.mark.parametrize("how", ["stopped", "frozen"])
async def test_without_the_log_calls_are_refused_promptly_and_later_served(
    env: dict[str, str], spawn: Any, stack: Stack, how: str
) -> None:
    async with open_desk(spawn, env, **LONG) as desk:
        assert (await desk.caller.infer()).status == 200
        pid = desk.gateway.process.pid
        async with away(stack, "kafka", how):
            reply = await refused_in(desk)
            assert reply.status == 503, reply.text
            # Either nothing was accepted, or the client must not repeat the call by itself: that is billed again.
            assert ("Retry-After" in reply.headers) is not (reply.headers.get("x-should-retry") == "false")
            assert (await desk.caller.call("GET", "/healthz")).status == 200

            async def says_why() -> bool:
                ready = await desk.caller.call("GET", "/readyz", timeout_s=PROMPT_S)
                return ready.status == 503 and "kafka" in ready.json["reasons"]

            await eventually(says_why)
        await works_again(desk.caller)
        assert desk.gateway.process.pid == pid
        assert desk.gateway.process.returncode is None


@pytest.mark.parametrize("how", ["stopped", "frozen"])
async def test_without_postgres_known_keys_go_on_and_unknown_ones_are_not_called_wrong(
    env: dict[str, str], spawn: Any, stack: Stack, how: str
) -> None:
    async with open_desk(spawn, env, **LONG) as desk:
        stranger = desk.caller.with_key(customer(env, "Late")["key"])
        assert (await desk.caller.infer()).status == 200
        async with away(stack, "postgres", how):
            assert (await desk.caller.infer(timeout_s=PROMPT_S)).status == 200

            async def refused() -> bool:
                return (await stranger.infer(timeout_s=PROMPT_S)).status == 503

            await eventually(refused)
            usage = await desk.caller.call("GET", "/v1/usage", timeout_s=PROMPT_S)
            assert usage.status == 503
            assert usage.json["code"] in ("ledger_away", "registry_away")

            async def says_why() -> bool:
                ready = await desk.caller.call("GET", "/readyz", timeout_s=PROMPT_S)
                return ready.status == 503 and "postgres" in ready.json["reasons"]

            await eventually(says_why)
        await works_again(stranger)
        await eventually(lambda: usage_works(desk.caller))


async def usage_works(caller: Caller) -> bool:
    return (await caller.call("GET", "/v1/usage", timeout_s=PROMPT_S)).status == 200


async def test_a_gateway_starts_without_any_server_and_serves_once_they_come(
    env: dict[str, str], spawn: Any, stack: Stack
) -> None:
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    for part in ("kafka", "postgres", "valkey"):
        await asyncio.to_thread(stack.stop_part, part, kill=True)
    try:
        gateway = start_gateway(spawn, env, wait=False, **LONG)
        async with calling(gateway, acme["key"]) as caller:

            async def alive() -> bool:
                return (await caller.call("GET", "/healthz")).status == 200

            await eventually(alive)
            ready = await caller.call("GET", "/readyz")
            assert ready.status == 503
            assert {"kafka", "postgres"} <= set(ready.json["reasons"])
            assert "results_cache" in ready.json["degraded"]
            assert (await caller.infer(timeout_s=PROMPT_S)).status == 503
    finally:
        for part in ("kafka", "postgres", "valkey"):
            await asyncio.to_thread(stack.start_part, part)
    async with calling(gateway, acme["key"]) as caller, echo_worker(env):
        await works_again(caller)


@pytest.mark.parametrize("how", ["stopped", "frozen"])
async def test_what_callers_are_told_while_kafka_is_away_is_what_happens(
    env: dict[str, str], spawn: Any, stack: Stack, how: str
) -> None:
    async with open_desk(spawn, env, **LONG) as desk:
        await desk.caller.infer()
        async with away(stack, "kafka", how):
            refused = await asyncio.gather(*(desk.caller.infer(timeout_s=PROMPT_S) for _ in range(60)))
            refused += [await refused_in(desk)]
        assert {r.status for r in refused} == {503}
        await works_again(desk.caller)
        ran = Counter(str(r.request_id) for r in desk.seen)
        for reply in refused:
            request_id, said = reply.headers["x-request-id"], reply.json["error"]
            if "was not accepted" in said:
                assert ran[request_id] == 0
                assert "Retry-After" in reply.headers
            else:
                assert (
                    f"may have been accepted; it runs at most once and is billed at most once as request {request_id}"
                    in said
                )
                assert ran[request_id] <= 1
                assert reply.headers["x-should-retry"] == "false"
                assert "Retry-After" not in reply.headers
        assert any("was not accepted" in r.json["error"] for r in refused)
        if how == "frozen":
            assert any("may have been accepted" in r.json["error"] for r in refused)


async def test_what_an_openai_client_repeats_because_nobody_could_say_whether_it_was_accepted_is_one_request(
    env: dict[str, str], spawn: Any, stack: Stack
) -> None:
    async with open_desk(spawn, env, **LONG) as desk:
        assert (await desk.caller.infer()).status == 200
        asked = 0

        async def count(_: Any) -> None:
            nonlocal asked
            asked += 1

        transport = httpx.AsyncClient(event_hooks={"request": [count]})
        client = openai.AsyncOpenAI(
            base_url=desk.gateway.url + "/v1", api_key=desk.acme["key"], max_retries=9, http_client=transport
        )
        async with client:
            async with away(stack, "kafka", "frozen"):
                call = asyncio.ensure_future(client.embeddings.create(model="texts", input="one"))
                await eventually(lambda: asked > 1, timeout_s=30)
            assert len((await call).data) == 1
        assert len({r.request_id for r in desk.seen if r.model == "texts"}) == 1


async def test_a_lost_hint_costs_a_second_not_the_answer(env: dict[str, str], spawn: Any) -> None:
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env, **LONG)
    async with calling(gateway, acme["key"]) as caller, echo_worker(env, hints=False):
        assert (await caller.infer(timeout_s=PROMPT_S)).status == 200


async def test_waiting_calls_survive_the_loss_of_every_redis_connection(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env, **LONG) as desk:
        await desk.caller.infer()
        calls = [asyncio.ensure_future(desk.caller.infer(timeout_s=PROMPT_S)) for _ in range(30)]
        async with open_redis(operator_settings(env).redis) as redis:
            await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert {(await call).status for call in calls} == {200}


async def test_a_passed_deadline_is_504_and_names_the_request(env: dict[str, str], spawn: Any) -> None:
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    async with calling(start_gateway(spawn, env, **LONG), acme["key"]) as caller:
        reply = await caller.infer(parameters={"timeout": 200_000}, timeout_s=PROMPT_S)
        assert reply.status == 504
        assert reply.headers["x-request-id"] in reply.json["error"]


async def test_a_queue_that_is_too_long_is_shed_and_a_pool_without_a_topic_refused(
    env: dict[str, str], spawn: Any
) -> None:
    await register(env, "digits", DIGITS)
    await register(env, "lost", manifest(producer="lost"), pool="nowhere")
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env, INFERLOG_MAX_QUEUED="3", **LONG)
    async with calling(gateway, acme["key"]) as caller:

        async def shed() -> Reply | None:
            reply = await caller.infer(parameters={"timeout": 10_000}, timeout_s=PROMPT_S)
            assert reply.status in (503, 504), reply.text
            return reply if reply.status == 503 else None

        reply = await eventually(shed)
        assert reply is not None
        assert "overloaded" in reply.json["error"]
        assert int(reply.headers["Retry-After"]) >= 1

        async def no_pool() -> Reply | None:
            found = await caller.infer(model="lost", timeout_s=PROMPT_S)
            return found if found.status == 503 else None

        reply = await eventually(no_pool)
        assert reply is not None
        assert "'nowhere'" in reply.json["error"]
        async with echo_worker(env):
            await works_again(caller)


async def test_stopping_answers_who_waits_and_ends_cleanly(env: dict[str, str], spawn: Any) -> None:
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme", requests_per_s=1, burst=5)  # so slow that its bucket is still there to be seen
    gateway = start_gateway(spawn, env, **LONG)
    async with calling(gateway, acme["key"]) as caller:
        call = asyncio.ensure_future(caller.infer(timeout_s=PROMPT_S))
        async with open_redis(operator_settings(env).redis) as redis:

            async def taken() -> bool:
                return bool(await redis.keys(f"{env['INFERLOG_NAMESPACE']}.limit:*"))

            await eventually(taken)
        gateway.process.terminate()
        reply = await call
        assert reply.status == 503
        assert reply.headers["x-request-id"] in reply.json["error"]
    assert await asyncio.to_thread(gateway.process.wait, 15) in (0, -signal.SIGTERM)
