from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest

from api.access.key_feed import Changes, KeyFeed
from api.access.keys import Keys, KeySourceAway
from api.access.revocations import RevokedKey
from tests.conditions import eventually
from tests.fakes import Clock, FakeKeys

STARTED = datetime(2026, 3, 1, tzinfo=timezone.utc)


class FakeChanges:
    """Implements ChangeSource: each answer once, in order; then nothing changes."""

    def __init__(self) -> None:
        self.answers: list[Changes | KeySourceAway] = []
        self.asked: list[str | None] = []
        self.server = STARTED

    async def changes(self, since: str | None) -> Changes:
        self.asked.append(since)
        answer = self.answers.pop(0) if self.answers else Changes(snapshot=f"{len(self.asked)}:", server=self.server)
        if isinstance(answer, KeySourceAway):
            raise answer
        return answer


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.stored = FakeKeys()
        self.keys = Keys(self.stored, environment="test", clock=self.clock, now=lambda: STARTED)
        self.changes = FakeChanges()
        self.revoked: list[RevokedKey] = []
        self.feed = KeyFeed(self.changes, self.keys, revoked=self.revoked.extend, clock=self.clock)
        self.key = self.stored.add()

    async def call(self) -> int:
        """Look-ups after one more call with the key."""
        await self.keys.identify(f"Bearer {self.key.secret}")
        return self.stored.lookups


async def test_each_read_asks_for_what_the_one_before_did_not_see() -> None:
    world = World()
    for _ in range(3):
        await world.feed.read()
    assert world.changes.asked == [None, "1:", "2:"]


async def test_what_was_known_before_the_first_read_is_looked_up_again_and_then_only_what_changed() -> None:
    world = World()
    assert await world.call() == 1
    await world.feed.read()
    assert await world.call() == 2
    world.clock.now_s += 3600
    await world.feed.read()
    assert await world.call() == 2
    gone = RevokedKey("cust_a", world.key.key_id)
    world.changes.answers = [Changes(snapshot="9:", server=STARTED, key_ids=[world.key.key_id], revoked=[gone])]
    await world.feed.read()
    assert await world.call() == 3
    assert world.revoked == [gone]


async def test_after_a_restart_of_the_server_nothing_counts_unseen() -> None:
    world = World()
    await world.feed.read()
    assert await world.call() == 1
    world.changes.server += timedelta(seconds=1)
    await world.feed.read()
    assert await world.call() == 2


async def test_a_read_that_takes_long_makes_what_is_known_no_younger() -> None:
    world = World()
    await world.feed.read()
    await world.call()
    began_s = world.clock.now_s
    answer = world.changes.changes

    async def late(since: str | None) -> Changes:
        world.clock.now_s += 6
        return await answer(since)

    world.changes.changes = late  # type: ignore[method-assign]
    await world.feed.read()
    assert world.clock.now_s - began_s == 6
    assert await world.call() == 2, "it was asked six seconds ago"


async def test_it_says_that_it_is_behind_and_heals(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    assert world.feed.trouble() == "changes of keys are not read: not read yet"
    world.changes.answers = [KeySourceAway("no server")]
    task = asyncio.ensure_future(world.feed.run())
    try:
        await eventually(lambda: "no server" in (world.feed.trouble() or ""))
        await eventually(lambda: world.feed.trouble() is None)
        world.clock.now_s += 3.5
        world.changes.answers = [KeySourceAway("gone again")] * 1000
        await eventually(lambda: "gone again" in (world.feed.trouble() or ""))
        assert caplog.text.count("changes of keys cannot be read") == 2
    finally:
        task.cancel()


async def test_nothing_counts_that_nobody_has_confirmed_for_thirty_seconds() -> None:
    world = World()
    await world.feed.read()
    await world.call()
    world.stored.away = True
    world.clock.now_s += 29.9
    await world.call()
    world.clock.now_s += 0.2
    with pytest.raises(Exception, match="model registry does not answer"):
        await world.call()
    await world.feed.read()
    await world.call()
