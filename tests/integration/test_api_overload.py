"""A pool whose worker stops, callers that go before their answer, a crowd of one customer: through real processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_worker.bundle import read_bundle
from infra.settings import replay_settings
from streams.replay.verify import verify
from tests.conditions import eventually
from tests.integration.api_desk import DIGITS, calling, customer, echo_worker, pixels, register, start_gateway
from tests.integration.worker_desk import constant_bundle, start_worker, store_bundle


async def test_a_pool_that_stands_still_is_shed_long_before_deadlines_and_served_again_when_it_moves(
    env: dict[str, str], spawn: Any
) -> None:
    await register(env, "digits", DIGITS)
    acme, other = customer(env, "Acme"), customer(env, "Other")
    gateway = start_gateway(
        spawn, env, INFERLOG_DEADLINE_S="8", INFERLOG_MAX_IN_FLIGHT="400", INFERLOG_MAX_IN_FLIGHT_PER_CUSTOMER="300"
    )
    seen: Counter[str] = Counter()

    async with calling(gateway, acme["key"]) as caller:

        async def call() -> int:
            reply = await caller.infer(timeout_s=30)
            code = reply.headers.get("Retry-After", "")
            seen[f"{reply.status}{' ' if code else ''}{'later' if code else ''}"] += 1
            return reply.status

        async def ready() -> int:
            return (await caller.call("GET", "/v2/models/digits/ready")).status

        async with echo_worker(env):
            for _ in range(100):
                assert await call() == 200
            assert await ready() == 200
        # Its worker has gone. Twenty calls a second go on coming, each with its 8 seconds.
        lost: list[asyncio.Future[int]] = []
        for _ in range(200):
            lost.append(asyncio.ensure_future(call()))
            await asyncio.sleep(0.05)
            if seen["503 later"] >= 20:
                break
        assert seen["503 later"] >= 20
        assert not seen["504"], "calls were refused before the first had waited in vain"
        assert await ready() == 503
        # Another customer hears the same, and at once.
        reply = await caller.with_key(other["key"]).infer(timeout_s=2)
        assert (reply.status, "is overloaded" in reply.text) == (503, True)
        async with echo_worker(env):

            async def served() -> bool:
                return await call() == 200

            await eventually(served, what="a pool that is served again")
            assert await ready() == 200
        await asyncio.gather(*lost)


async def test_one_customer_takes_its_share_of_the_places_and_another_is_served(
    env: dict[str, str], spawn: Any
) -> None:
    await register(env, "digits", DIGITS)
    acme, other = customer(env, "Acme"), customer(env, "Other")
    gateway = start_gateway(spawn, env, INFERLOG_MAX_IN_FLIGHT="40", INFERLOG_DEADLINE_S="60")
    async with calling(gateway, acme["key"]) as caller:
        calls = [asyncio.ensure_future(caller.infer(timeout_s=60)) for _ in range(100)]
        await eventually(lambda: sum(c.done() for c in calls) == 90)
        refused = [c.result() for c in calls if c.done()]
        assert {r.status for r in refused} == {503}
        assert "as many as it may have" in refused[0].text
        async with echo_worker(env):
            assert (await caller.with_key(other["key"]).infer()).status == 200
            assert Counter([r.status for r in await asyncio.gather(*calls)]) == {200: 10, 503: 90}


async def test_what_nobody_waits_for_is_not_run_and_costs_nothing(
    env: dict[str, str], spawn: Any, tmp_path: Path
) -> None:
    """Callers hang up before there is a worker; one of them may come again, by its key, and one stays."""
    folder = constant_bundle(tmp_path / "one", 1.0)
    store_bundle(env, folder)
    await register(env, "digits", read_bundle(folder))
    gateway = start_gateway(spawn, env, INFERLOG_DEADLINE_S="60")
    async with calling(gateway, customer(env, "Acme")["key"]) as caller:
        path, body = "/v2/models/digits/infer", {"inputs": [pixels()]}
        headers = [{}, *[{} for _ in range(10)], {"Idempotency-Key": "one"}]
        stays, *goes = (asyncio.ensure_future(caller.call("POST", path, body, timeout_s=60, **own)) for own in headers)

        async def figures() -> dict[str, int | None]:
            report = await verify(replay_settings(env))
            (found,) = [v for v in report.verdicts if v.name == "I4"]
            assert not found.findings
            return dict(found.figures)

        async def accepted() -> bool:
            return (await figures())["accepted"] == 12

        await eventually(accepted)
        for call in goes:
            call.cancel()
        await asyncio.wait(goes)

        async def told() -> bool:
            return (await caller.call("GET", "/readyz")).json["counts"]["callers_gone"] == 10

        await eventually(told)
        start_worker(spawn, env)
        assert (await stays).status == 200

        async def ended() -> bool:
            return (await figures())["open"] == 0

        await eventually(ended)
        found = await figures()
        assert (found["succeeded"], found["cancelled"], found["failed"], found["expired"]) == (2, 10, 0, 0)
        # The one with a key comes again, and hears of its own run; who was cancelled has no usage (I4 looks for it).
        again = await caller.call("POST", path, body, **headers[-1])
        assert again.status == 200
        assert (await figures())["accepted"] == 12
