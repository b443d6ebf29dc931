"""How many calls without a key are answered, by whom they come, and what the others wait for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from api.door.pace import (
    _APART_S,
    _BURST_S,
    HELD_S,
    MOST_HELD,
    MOST_HELD_BY_PEER,
    PATIENCE_S,
    RARE_PER_S,
    TURNS_JUDGED,
    Pace,
    Refused,
    peer_of,
)
from api.errors import Surface, body
from tests.fakes import Clock
from tests.unit.api.test_errors import ID


class World:
    """Time passes only by `pass_s`; whoever sleeps goes on when it has."""

    def __init__(self, per_s: float, **options: Any) -> None:
        self.clock = Clock()
        self._due: list[tuple[float, Callable[[], None]]] = []
        self.strangers = Pace(per_s=per_s, clock=self.clock, sleep=self._sleep, later=self._later, **options)
        self.waits_s: list[float] = []

    async def _sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        woken = asyncio.Event()
        self._later(seconds, woken.set)
        await woken.wait()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._due.append((self.clock.now_s + seconds, call))

    async def pass_s(self, seconds: float) -> None:
        self.clock.now_s += seconds
        ripe = [call for due_s, call in self._due if due_s <= self.clock.now_s + 1e-9]
        self._due = [(due_s, call) for due_s, call in self._due if due_s > self.clock.now_s + 1e-9]
        for call in ripe:
            call()
        await settle()

    async def call(self, peer: str, *, health: bool = False, turns: float = 1.0) -> asyncio.Future[None]:
        """One that has gone as far as it can without time."""
        made = asyncio.ensure_future(self.strangers.turn(peer, health=health, turns=turns))
        await asyncio.sleep(0)
        return made

    async def calls(self, count: int, peer: str) -> list[asyncio.Future[None]]:
        return [await self.call(peer) for _ in range(count)]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def refusal(call: asyncio.Future[None]) -> Refused | None:
    error = call.exception() if call.done() else None
    assert error is None or isinstance(error, Refused)
    return error


async def done(calls: list[asyncio.Future[None]]) -> int:
    await settle()
    return sum(c.done() and refusal(c) is None for c in calls)


async def test_calls_over_the_rate_wait_for_their_turn_and_go_on_in_order() -> None:
    world = World(per_s=20)
    calls = await world.calls(11, "a")
    answered = [await done(calls)]
    for _ in range(10):
        await world.pass_s(0.1)
        answered.append(await done(calls))
    assert answered == sorted(answered)
    assert answered[-1] == 11
    # Ten a second for one peer: two in the first tenth, one more with each.
    assert answered[:4] == [1, 2, 3, 4]


async def test_a_call_that_costs_more_takes_more_turns_and_the_next_waits_for_them() -> None:
    world = World(per_s=20)
    await world.strangers.turn("a", turns=5)
    following = await world.call("a")
    assert world.waits_s == [pytest.approx(5 / 10 - _BURST_S)]
    await world.pass_s(0.5)
    assert await done([following]) == 1


async def test_one_peer_gets_half_and_the_others_do_not_wait_for_it() -> None:
    world = World(per_s=20)
    flood = await world.calls(200, "a")
    other = await world.call("b")
    await settle()
    assert other.done()
    assert refusal(other) is None
    for call in flood:
        call.cancel()


@pytest.mark.parametrize("seed", range(5))
async def test_whoever_they_are_all_together_get_no_more_than_the_rate(seed: int) -> None:
    rng, world, per_s = random.Random(seed), World(per_s=50), 50
    calls: list[asyncio.Future[None]] = []
    for _ in range(40):
        for _ in range(rng.randint(0, 60)):
            calls.append(await world.call(f"peer{rng.randrange(30)}"))
        await world.pass_s(0.05)
    assert await done(calls) <= per_s * (40 * 0.05 + 0.05) + 1
    assert await done(calls) >= per_s
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_who_would_wait_too_long_is_refused_and_its_refusal_is_held_back() -> None:
    world = World(per_s=20)
    calls = await world.calls(40, "a")
    waiting = [c for c in calls if not c.done()]
    assert max(world.waits_s) <= PATIENCE_S
    late = await world.call("a")
    await world.pass_s(HELD_S - 0.1)
    assert not late.done()
    await world.pass_s(0.1 + 40 * _APART_S)
    refused = refusal(late)
    assert refused is not None
    assert not refused.hang_up
    assert refused.headers["Retry-After"] == "1"
    document, _ = body(refused, Surface.REGISTRY, ID)
    assert document["error_code"] == 429
    assert (
        world.strangers.counts["strangers_refused"]
        == len(calls) - await done(calls) - sum(not c.done() for c in waiting) + 1
    )
    for _ in range(30):
        await world.pass_s(0.1)
    again = await world.call("a")
    await settle()
    assert again.done()
    assert refusal(again) is None


async def test_refusals_of_one_peer_are_let_go_one_after_the_other() -> None:
    world = World(per_s=2)
    await world.calls(2 + MOST_HELD_BY_PEER, "a")
    held_s = world.waits_s[-200:]  # the first few waited for their turn
    apart_s = [later - earlier for earlier, later in pairwise(held_s)]
    assert apart_s == [pytest.approx(_APART_S)] * len(apart_s), "or they would all call again at the same moment"
    assert max(held_s) <= 2 * HELD_S


async def test_past_a_number_of_held_refusals_a_peer_is_hung_up_on_and_crowds() -> None:
    world = World(per_s=2)
    calls = await world.calls(2 + MOST_HELD_BY_PEER + 5, "a")
    assert world.strangers.crowding("a")
    assert not world.strangers.crowding("b")
    at_once = [c for c in calls if c.done() and (error := refusal(c)) and error.hang_up]
    assert at_once
    # Who hangs up itself does not free its place before its time.
    for call in calls:
        call.cancel()
    await settle()
    assert world.strangers.crowding("a")
    await world.pass_s(HELD_S)
    assert not world.strangers.crowding("a")


async def test_connections_that_ask_for_nothing_count_as_refusals() -> None:
    world = World(per_s=1000)
    for _ in range(MOST_HELD_BY_PEER * 3):
        world.strangers.wasted("a")
    assert world.strangers.crowding("a")
    await world.pass_s(HELD_S)
    assert not world.strangers.crowding("a")


async def test_a_peer_with_customers_behind_it_does_not_crowd() -> None:
    world = World(per_s=2)
    world.strangers.welcome("proxy")
    calls = await world.calls(2 + MOST_HELD_BY_PEER + 5, "proxy")
    assert not world.strangers.crowding("proxy")
    for call in calls:
        call.cancel()
    # Not without a bound either: they could be one customer's who means no good.
    for _ in range(MOST_HELD):
        world.strangers.wasted("proxy")
    assert world.strangers.crowding("proxy")
    await world.pass_s(HELD_S)
    assert not world.strangers.crowding("proxy")


async def test_held_refusals_are_bounded_over_all_peers() -> None:
    world = World(per_s=2)
    calls = [await world.call(f"peer{n % 30}") for n in range(MOST_HELD + 100)]
    assert any(c.done() and (error := refusal(c)) and error.hang_up for c in calls)
    assert len(world.waits_s) <= MOST_HELD + 100
    assert sum(w == HELD_S for w in world.waits_s) <= MOST_HELD
    for call in calls:
        call.cancel()


async def test_who_asks_for_health_waits_neither_for_others_nor_for_its_own_reading() -> None:
    world = World(per_s=10)
    flood = [await world.call(f"peer{n % 7}") for n in range(300)] + await world.calls(50, "kubelet")
    health = await world.call("kubelet", health=True)
    await settle()
    assert health.done()
    assert refusal(health) is None
    for call in flood:
        call.cancel()


async def test_peers_are_forgotten_and_the_number_remembered_is_bounded() -> None:
    world = World(per_s=1_000_000)
    for n in range(10_500):
        world.strangers.welcome(f"p{n}")
    assert len(world.strangers._peers) <= 10_001
    world.clock.now_s += 3600
    for n in range(10):
        world.strangers.welcome(f"q{n}")
    assert len(world.strangers._peers) <= 11


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        (("10.0.0.7", 51234), "10.0.0.7"),
        (("::ffff:10.0.0.7", 51234, 0, 0), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::"),
        (("2001:db8:1:2::9", 1, 0, 0), "2001:db8:1:2::"),
        (("fe80::1%eth0", 1, 0, 3), "fe80::"),
        ("/run/socket", ""),
        ("", ""),
        (None, ""),
        (("nonsense", 1), ""),
    ],
)
def test_a_peer_is_an_address_or_a_subscribers_network(address: object, peer: str) -> None:
    assert peer_of(address) == peer


@pytest.mark.parametrize("turns", [1.0, TURNS_JUDGED])
async def test_a_key_that_calls_once_a_second_waits_for_none_of_those_that_flood(turns: float) -> None:
    world = World(per_s=100, share=0.25, rare_per_s=RARE_PER_S)
    honest = 0
    flood: list[asyncio.Future[None]] = []
    for second in range(10):
        for _ in range(10):
            flood += [await world.call(f"key{n}") for n in range(8) for _ in range(20)]
            await world.pass_s(0.1)
        call = await world.call("honest", turns=turns)
        honest += call.done() and refusal(call) is None
        assert honest == second + 1
    # Together they get the rate, and beside it what each may have at any time.
    assert await done(flood) <= 100 * 10.05 + 8 * (RARE_PER_S * 12 + 1)
    for call in flood:
        call.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_refusal_says_whose_calls_were_too_many() -> None:
    world = World(per_s=40, share=0.5, what="reads with {}", whose="this key")
    mine = await world.calls(100, "a")
    await world.pass_s(HELD_S)
    told = [error for call in mine if (error := refusal(call))]
    assert {(error.status, error.code) for error in told} == {(429, "too_many_free_calls")}
    assert all("with this key" in error.message for error in told)
    # The others fill what is for all; the next one has asked for nothing yet.
    for n in range(200):
        await world.call(f"other{n}")
    late = await world.call("b")
    await world.pass_s(HELD_S)
    error = refusal(late)
    assert error is not None
    assert (error.status, error.code) == (503, "crowded")
    assert "with all others" in error.message
    assert error.headers["Retry-After"] == "1"


async def test_a_welcome_address_is_barred_for_refusals_too_when_they_are_very_many() -> None:
    world = World(per_s=2)
    world.strangers.welcome("proxy")
    calls = await world.calls(MOST_HELD, "proxy")
    assert not world.strangers.crowding("proxy")
    calls += await world.calls(10, "proxy")
    assert world.strangers.crowding("proxy")
    await world.pass_s(HELD_S)
    assert not world.strangers.crowding("proxy")
    for call in calls:
        call.cancel()


async def test_connections_that_ask_for_nothing_take_no_place_among_the_refusals_that_are_held() -> None:
    world = World(per_s=2)
    for n in range(8):
        for _ in range(MOST_HELD):
            world.strangers.wasted(f"hostile{n}")
    calls = await world.calls(8, "other")
    await settle()
    assert HELD_S in world.waits_s
    assert not any(call.done() and refusal(call) for call in calls)
    for call in calls:
        call.cancel()


async def test_a_key_is_vouched_for_by_all_of_it_and_no_longer_than_its_peer_is_remembered() -> None:
    world = World(per_s=1_000_000)
    assert not world.strangers.vouches("a", b"one")
    world.strangers.vouch("a", b"one")
    assert world.strangers.vouches("a", b"one")
    assert not world.strangers.vouches("a", b"two")
    assert not world.strangers.vouches("b", b"one")
