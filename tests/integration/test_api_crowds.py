"""Many callers at once: too many, callers that hang up, and strangers with keys they made up."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from confluent_kafka.schema_registry import SchemaRegistryClient

from api.access.key_shape import mint
from tests.conditions import eventually
from tests.integration.api_desk import DIGITS, Reply, calling, customer, open_desk, register, start_gateway
from tests.integration.test_api_faults import LONG, PROMPT_S


async def test_callers_that_hang_up_leave_their_places_to_others(env: dict[str, str], spawn: Any) -> None:
    """Nothing answers these requests, so a place would stay taken for their deadline of 60 s."""
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env, INFERLOG_MAX_IN_FLIGHT="10", INFERLOG_MAX_IN_FLIGHT_PER_CUSTOMER="10", **LONG)
    async with calling(gateway, acme["key"]) as caller:

        async def hang_up(calls: list[asyncio.Future[Reply]]) -> None:
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)

        async def all_free() -> bool:
            calls = [asyncio.ensure_future(caller.infer(timeout_s=60)) for _ in range(11)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            refused = sum(call.done() for call in calls)
            await hang_up(calls)
            return refused == 1

        for _ in range(5):
            calls = [asyncio.ensure_future(caller.infer(timeout_s=60)) for _ in range(30)]
            await eventually(lambda calls=calls: sum(c.done() for c in calls) == 20, what="ten that hold every place")
            await hang_up(calls)
            await eventually(all_free)


async def test_strangers_with_made_up_keys_do_not_hold_up_a_known_caller(env: dict[str, str], spawn: Any) -> None:
    # The rate of strangers is raised: here it is the look-up of keys that has to hold them off.
    async with open_desk(spawn, env, INFERLOG_STRANGERS_PER_S="100000", **LONG) as desk:
        assert (await desk.caller.infer()).status == 200
        answers: Counter[int] = Counter()
        made_up = iter([mint("test").secret for _ in range(5000)])

        async def hammer() -> None:
            for key in made_up:
                reply = await desk.caller.with_key(key).call("GET", "/v1/models", timeout_s=PROMPT_S)
                answers[reply.status] += 1
                assert reply.status == 401 or reply.headers["Retry-After"] == "1"

        strangers = [asyncio.ensure_future(hammer()) for _ in range(80)]
        while not all(s.done() for s in strangers):
            assert (await desk.caller.infer(timeout_s=PROMPT_S)).status == 200
        await asyncio.gather(*strangers)
        assert set(answers) <= {401, 503}
        assert sum(answers.values()) == 5000


async def test_a_gateway_waits_for_a_bounded_number_of_requests(env: dict[str, str], spawn: Any) -> None:
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env, INFERLOG_MAX_IN_FLIGHT="5", INFERLOG_MAX_IN_FLIGHT_PER_CUSTOMER="5", **LONG)
    async with calling(gateway, acme["key"]) as caller:
        calls = (caller.infer(parameters={"timeout": 3_000_000}, timeout_s=PROMPT_S) for _ in range(100))
        ends = Counter([reply.status for reply in await asyncio.gather(*calls)])
        assert ends == {504: 5, 503: 95}


async def test_a_flood_without_keys_and_heads_that_never_end_leave_the_rest_alone(
    env: dict[str, str], spawn: Any
) -> None:
    async with open_desk(spawn, env, INFERLOG_STRANGERS_PER_S="40", **LONG) as desk:
        host, port = desk.gateway.url.removeprefix("http://").split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(500)]
        for _, writer in slow:
            writer.write(b"GET /registry/subj")
        answers: Counter[int] = Counter()
        stranger = desk.caller.with_key(mint("test").secret)

        async def hammer(number: int) -> None:
            for path in ("/registry/schemas", "/nowhere", "/v1/models", "/registry/schemas/ids/1"):
                reply = await stranger.call("GET", path, timeout_s=30)
                answers[reply.status] += 1
                if reply.status == 429:
                    assert reply.headers["Retry-After"] == "1"
                if reply.status == 429 and path.startswith("/registry"):
                    assert reply.json["error_code"] == 429

        flood = [asyncio.ensure_future(hammer(number)) for number in range(90)]
        while not all(f.done() for f in flood):
            assert (await desk.caller.infer(timeout_s=PROMPT_S)).status == 200
        await asyncio.gather(*flood)
        assert answers[429] > 0
        assert set(answers) <= {200, 401, 404, 429, 503}
        counts = (await desk.caller.call("GET", "/readyz")).json["counts"]
        assert counts["strangers_refused"] >= answers[429]

        async def waste() -> None:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
                writer.close()

        async def turned_away() -> bool:
            await asyncio.gather(*(waste() for _ in range(400)))
            return bool((await desk.caller.call("GET", "/readyz")).json["counts"]["connections_refused"])

        if sys.platform == "linux":  # where another address of this machine can be had
            await eventually(turned_away)
            assert (await desk.caller.infer(timeout_s=PROMPT_S)).status == 200

        # Confluent's own client, many of them started at once, comes through.
        def worker() -> set[str]:
            with SchemaRegistryClient({"url": f"{desk.gateway.url}/registry"}) as client:
                return {str(client.get_schema(number).schema_type) for number in (1, 2, 3)}

        assert await asyncio.gather(*(asyncio.to_thread(worker) for _ in range(15))) == [{"AVRO"}] * 15

        # A schema that does not arrive ends its call; other bodies have longer.
        reader, writer = await asyncio.open_connection(host, int(port))
        subject = f"{env['INFERLOG_NAMESPACE']}.inference.usage.v1-value"
        head = f"POST /registry/subjects/{subject} HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"
        writer.write(head.encode() + b"{")
        assert b"within 3 s" in await asyncio.wait_for(reader.read(), 60)
        writer.close()

        async def ended(reader: asyncio.StreamReader) -> bytes:
            with suppress(ConnectionResetError):
                return await reader.read()
            return b""

        assert set(await asyncio.wait_for(asyncio.gather(*(ended(reader) for reader, _ in slow)), 60)) == {b""}
        for _, writer in slow:
            writer.close()
