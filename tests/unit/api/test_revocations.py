from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from api.access import revocations as module
from api.access.keys import KeySourceAway
from api.access.revocations import Revocations, RevokedKey, RevokedSetAway
from tests.conditions import eventually


class FakeRevoked:
    """Implements RevokedSource and RevokedSet. `empty` loses everything, as FLUSHALL does."""

    def __init__(self, *key_ids: str) -> None:
        self.stored = [RevokedKey("c", key_id) for key_id in sorted(key_ids)]
        self.members: set[RevokedKey] = set()
        self.marks: set[str] = set()
        self.away = False
        self.empty_after: int | None = None
        self.pages = 0
        self.asked = 0

    def empty(self) -> None:
        self.members, self.marks = set(), set()

    async def revoked(self, after: str, *, at_most: int) -> Sequence[RevokedKey]:
        self.pages += 1
        if self.pages == self.empty_after:
            self.empty()
        return [k for k in self.stored if k.key_id > after][:at_most]

    async def is_whole(self) -> bool:
        self._answer()
        return "whole" in self.marks

    async def begin(self) -> str:
        self._answer()
        self.marks.add("repair")
        return "repair"

    async def add(self, keys: Sequence[RevokedKey]) -> None:
        self._answer()
        self.members.update(keys)

    async def finish(self, repair: str) -> bool:
        self._answer()
        if repair not in self.marks:
            return False
        self.marks = self.marks - {repair} | {"whole"}
        return True

    def _answer(self) -> None:
        self.asked += 1
        if self.away:
            raise RevokedSetAway("switched off")


async def test_a_set_that_is_whole_is_left_alone_and_one_that_is_not_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    fake = FakeRevoked("a", "b", "c", "d", "e")
    kept = Revocations(fake, fake)
    assert await kept.keep()
    assert (fake.members, fake.pages) == (set(fake.stored), 4)
    assert not await kept.keep()
    assert fake.pages == 4
    fake.empty()
    assert await kept.keep()
    assert fake.members == set(fake.stored)


@pytest.mark.parametrize("page", [1, 2, 3, 4])
async def test_what_is_lost_while_it_is_filled_is_noticed(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)
    fake = FakeRevoked("a", "b", "c", "d", "e")
    kept = Revocations(fake, fake)
    fake.empty_after = page
    await kept.keep()
    assert "whole" not in fake.marks
    await kept.keep()
    assert fake.members == set(fake.stored)
    assert fake.marks == {"whole"}


async def test_what_the_feed_told_is_put_in_at_once_and_kept_until_it_can_be() -> None:
    fake = FakeRevoked()
    kept = Revocations(fake, fake)
    task = asyncio.ensure_future(kept.run())
    try:
        await eventually(lambda: "whole" in fake.marks)
        kept.told([RevokedKey("c", "new")])
        await eventually(lambda: RevokedKey("c", "new") in fake.members, timeout_s=module.CHECK_EVERY_S / 2)
        fake.away = True
        asked = fake.asked
        kept.told([RevokedKey("c", "later")])
        await eventually(lambda: fake.asked > asked, what="it was tried")
        fake.away = False
        await eventually(lambda: RevokedKey("c", "later") in fake.members)
    finally:
        task.cancel()


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 3)
    fake = FakeRevoked()
    kept = Revocations(fake, fake)
    kept.told([RevokedKey("c", str(n)) for n in range(10)])
    await kept.keep()
    assert {k.key_id for k in fake.members} == {"7", "8", "9"}


async def test_a_registry_that_is_away_leaves_the_set_unmarked() -> None:
    fake = FakeRevoked("a")

    async def away(after: str, *, at_most: int) -> Sequence[RevokedKey]:
        raise KeySourceAway("no server")

    fake.revoked = away  # type: ignore[method-assign]
    with pytest.raises(KeySourceAway):
        await Revocations(fake, fake).keep()
    assert "whole" not in fake.marks
