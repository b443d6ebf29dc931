"""Who gets room for a body, who waits and who gives way; bytes come from queues instead of sockets."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from api.door import bodies as module
from api.door.bodies import SMALL_BYTES, Bodies
from api.errors import ApiError, BadInput, TooLarge, Unavailable
from tests.conditions import eventually
from tests.fakes import Clock

MIB = 1024 * 1024


class Upload:
    """A body on its way, and what becomes of it."""

    def __init__(self, bodies: Bodies, holder: str, size_bytes: int | None, **options: Any) -> None:
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self.began = False
        self.task = asyncio.ensure_future(
            bodies.read(holder, self._next, **{"size_bytes": size_bytes, "limit_bytes": 4 * MIB, **options})
        )

    async def _next(self) -> bytes:
        self.began = True
        return await self.pieces.get()

    def send(self, *sizes: int) -> None:
        for size in sizes:
            self.pieces.put_nowait(b"x" * size)

    async def end(self) -> ApiError | int:
        try:
            return len(await asyncio.wait_for(self.task, 10))
        except ApiError as error:
            return error


async def test_a_body_is_whole_in_however_many_pieces_it_comes() -> None:
    bodies = Bodies(most_bytes=16 * MIB)
    for size in (100, SMALL_BYTES, 3 * MIB):
        for said in (size, None):
            upload = Upload(bodies, "k", said)
            upload.send(*[size // 4] * 4, 0)
            assert await upload.end() == size // 4 * 4
    assert bodies.held_bytes == 0


async def test_room_is_taken_before_the_first_byte_is_read() -> None:
    bodies = Bodies(most_bytes=8 * MIB)
    first, second, third = Upload(bodies, "a", 4 * MIB), Upload(bodies, "b", 4 * MIB), Upload(bodies, "c", 4 * MIB)
    await eventually(lambda: first.began and second.began and bodies.counts["bodies_waited"] == 1)
    assert (bodies.held_bytes, third.began) == (8 * MIB, False)
    small = Upload(bodies, "d", SMALL_BYTES)
    small.send(SMALL_BYTES, 0)
    assert await small.end() == SMALL_BYTES  # what every connection may hold anyway waits for nobody
    first.send(4 * MIB, 0)
    assert await first.end() == 4 * MIB
    await eventually(lambda: third.began)
    for upload in (second, third):
        upload.send(4 * MIB, 0)
        assert await upload.end() == 4 * MIB
    assert bodies.held_bytes == 0


async def test_one_key_takes_half_and_keeps_nobody_else_waiting() -> None:
    bodies = Bodies(most_bytes=8 * MIB)
    hogs = [Upload(bodies, "hog", 2 * MIB) for _ in range(20)]
    await eventually(lambda: sum(h.began for h in hogs) == 2)
    other = Upload(bodies, "other", 4 * MIB)
    other.send(4 * MIB, 0)
    assert await other.end() == 4 * MIB
    assert bodies.held_bytes == 4 * MIB
    for hog in hogs:
        hog.task.cancel()
    await asyncio.wait([h.task for h in hogs])
    assert (bodies.held_bytes, dict(bodies._holders), bodies._waiting, bodies._readings) == (0, {}, {}, {})


async def test_who_finds_no_room_for_long_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    bodies = Bodies(most_bytes=2 * MIB)
    held = Upload(bodies, "a", MIB)
    await eventually(lambda: held.began)
    refused = await Upload(bodies, "a", MIB).end()
    assert isinstance(refused, Unavailable)
    assert (refused.status, refused.code) == (503, "crowded")
    assert "Retry-After" in refused.headers
    held.send(MIB, 0)
    assert await held.end() == MIB


async def test_what_takes_long_gives_way_but_only_to_those_who_need_its_room() -> None:
    clock = Clock()
    bodies = Bodies(most_bytes=4 * MIB, clock=clock)
    slow = [Upload(bodies, "a", 2 * MIB), Upload(bodies, "b", 2 * MIB)]
    await eventually(lambda: all(s.began for s in slow))
    for upload in slow:
        upload.send(1)
    clock.now_s += module.YIELD_AFTER_S - 0.1
    third = Upload(bodies, "c", MIB)
    await eventually(lambda: bodies.counts["bodies_waited"] == 1)
    assert not bodies.counts["bodies_gave_way"]
    third.task.cancel()
    clock.now_s += 0.2
    fourth = Upload(bodies, "c", MIB)
    fourth.send(MIB, 0)
    assert await fourth.end() == MIB
    gone = await slow[0].end()
    assert isinstance(gone, Unavailable)
    assert gone.code == "crowded"
    slow[1].send(2 * MIB - 1, 0)
    assert await slow[1].end() == 2 * MIB  # one was enough
    assert bodies.held_bytes == 0


async def test_who_waits_for_its_own_share_displaces_only_its_own() -> None:
    clock = Clock()
    bodies = Bodies(most_bytes=8 * MIB, clock=clock)
    other, mine = Upload(bodies, "other", 2 * MIB), Upload(bodies, "mine", 4 * MIB)
    await eventually(lambda: other.began and mine.began)
    clock.now_s += module.YIELD_AFTER_S
    new = Upload(bodies, "mine", 4 * MIB)
    new.send(4 * MIB, 0)
    assert await new.end() == 4 * MIB
    assert isinstance(await mine.end(), Unavailable)
    other.send(2 * MIB, 0)
    assert await other.end() == 2 * MIB


async def test_an_endless_body_ends_at_the_limit_and_takes_room_as_it_comes() -> None:
    bodies = Bodies(most_bytes=16 * MIB)
    upload = Upload(bodies, "k", None)
    upload.send(MIB)
    await eventually(lambda: bodies.held_bytes == MIB)
    upload.send(*[MIB] * 100)
    assert isinstance(await upload.end(), TooLarge)
    assert upload.pieces.qsize() >= 95
    assert bodies.held_bytes == 0


async def test_a_body_that_does_not_come_and_a_caller_that_goes_give_their_room_back() -> None:
    bodies = Bodies(most_bytes=16 * MIB)
    late = await Upload(bodies, "k", MIB, within_s=0.02).end()
    assert isinstance(late, BadInput)
    assert late.code == "body_timeout"
    gone = Upload(bodies, "k", MIB)
    await eventually(lambda: bodies.held_bytes == MIB)
    gone.task.cancel()
    await asyncio.wait([gone.task])
    assert gone.task.cancelled()
    assert bodies.held_bytes == 0

    async def broken() -> bytes:
        raise ValueError("the connection broke")

    with pytest.raises(ValueError, match="broke"):
        await bodies.read("k", broken, size_bytes=MIB, limit_bytes=MIB)
    assert (bodies.held_bytes, bodies._readings) == (0, {})


async def test_however_they_come_the_bound_holds_and_everybody_hears_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "YIELD_AFTER_S", 0.02)
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")  # noqa: T201
    bodies, most = Bodies(most_bytes=2 * MIB), 0
    uploads = []
    for _ in range(300):
        size = chance.choice((1000, 100_000, 500_000))
        upload = Upload(bodies, chance.choice("abc"), chance.choice((size, None)), limit_bytes=MIB, within_s=0.2)
        upload.send(*[size // 10] * 10)
        if chance.random() < 0.7:
            upload.send(0)  # others never end
        if chance.random() < 0.1:
            asyncio.get_running_loop().call_later(chance.random() / 10, upload.task.cancel)
        uploads.append(upload)
        if chance.random() < 0.3:
            await asyncio.sleep(0)
        most = max(most, bodies.held_bytes)
        assert all(n <= MIB for n in bodies._holders.values())
    await asyncio.wait([u.task for u in uploads])
    assert most <= 2 * MIB
    assert (bodies.held_bytes, dict(bodies._holders), bodies._waiting, bodies._readings) == (0, {}, {}, {})
    ends = [u.task.exception() for u in uploads if not u.task.cancelled()]
    assert None in ends
    assert {type(end) for end in ends} <= {type(None), BadInput, Unavailable}
