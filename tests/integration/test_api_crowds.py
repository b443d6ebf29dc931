"""Many callers at once: too many, callers that hang up, and strangers with keys they made up."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from api.admission.keys import mint
from tests.conditions import eventually
from tests.integration.api_desk import DIGITS, calling, customer, open_desk, register, start_gateway
from tests.integration.test_api_faults import LONG, PROMPT_S


async def test_callers_that_hang_up_leave_their_places_to_others(env: dict[str, str], spawn: Any) -> None:
    """Nothing answers these requests, so a place would stay taken for their deadline of 60 s."""
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env, INFERLOG_MAX_IN_FLIGHT="10", **LONG)
    async with calling(gateway, acme["key"]) as caller:

        async def all_free() -> bool:
            short = (caller.infer(parameters={"timeout": 1_000}, timeout_s=PROMPT_S) for _ in range(10))
            return {r.status for r in await asyncio.gather(*short)} == {504}

        for _ in range(5):
            calls = [asyncio.ensure_future(caller.infer(timeout_s=60)) for _ in range(30)]
            await eventually(lambda calls=calls: sum(c.done() for c in calls) == 20, what="ten that hold every place")
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            await eventually(all_free)


async def test_strangers_with_made_up_keys_do_not_hold_up_a_known_caller(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env, **LONG) as desk:
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
    gateway = start_gateway(spawn, env, INFERLOG_MAX_IN_FLIGHT="5", **LONG)
    async with calling(gateway, acme["key"]) as caller:
        calls = (caller.infer(parameters={"timeout": 3_000_000}, timeout_s=PROMPT_S) for _ in range(100))
        ends = Counter([reply.status for reply in await asyncio.gather(*calls)])
        assert ends == {504: 5, 503: 95}
