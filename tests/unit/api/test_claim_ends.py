"""How a claim ends: accepted, withdrawn or void, told by calls that may have been overtaken meanwhile."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from itertools import permutations
from typing import Any

import pytest

from api.once.batches import Notes
from api.once.claims import COUNTED_HORIZON_S, OWNER_S, BookAway, Sameness
from api.once.pruning import _let_go
from tests.claims import MemoryBook, accepted, call, claim, entry, once, settle, void, withdrawn
from tests.conditions import eventually


async def test_a_twin_of_a_call_that_was_refused_becomes_the_first() -> None:
    book = MemoryBook()
    here, there = once(book), once(book)
    first = await claim(here, call(key="k"))
    twin = asyncio.ensure_future(claim(there, call(key="k")))
    await asyncio.sleep(0)
    here.withdraw(first)
    await settle(here)
    found = await twin
    assert found.is_ours
    assert found.decisions.request_id != first.decisions.request_id


async def test_a_refused_call_that_took_a_claim_over_does_not_withdraw_it() -> None:
    """Whoever had it before may have put it on the log: a first call now would be a second charge."""
    book = MemoryBook()
    first = await claim(once(book), call(key="k"))
    await book.pass_s(OWNER_S)
    there = once(book)
    there.withdraw(await claim(there, call(key="k")))
    await settle(there)
    await book.pass_s(OWNER_S)
    assert (await claim(once(book), call(key="k"))).decisions == first.decisions


@pytest.mark.parametrize("twins", ["is admitting", "accepted", "accepted and written"])
@pytest.mark.parametrize("where", ["elsewhere", "in the same process"])
@pytest.mark.parametrize("said", [(call(key="k"),) * 3, (call(retry=0), call(retry=1), call(retry=2))])
async def test_a_call_that_was_overtaken_and_is_refused_then_leaves_the_claim_to_the_one_that_overtook_it(
    said: tuple[Sameness, Sameness, Sameness], where: str, twins: str
) -> None:
    """What the twin put on the log is run and billed: the next call like it must find it, whoever says what when."""
    book = MemoryBook()
    here = once(book)
    there = here if where == "in the same process" else once(book)
    slow = await claim(here, said[0])
    await book.pass_s(OWNER_S)
    twin = await claim(there, said[1])
    assert twin.is_taken_over
    if twins != "is admitting":
        there.accepted(twin)
    if twins == "accepted and written":
        await settle(there)
    here.withdraw(slow)
    await settle(here)
    there.accepted(twin)
    await settle(there)
    third = await claim(once(book), said[2])
    assert (third.is_ours, third.decisions) == (False, twin.decisions)


@pytest.mark.parametrize("said", [(call(key="k"),) * 2, (call(retry=0), call(retry=1))])
async def test_a_call_that_joined_and_waits_does_not_keep_a_refused_ones_claim(said: tuple[Sameness, Sameness]) -> None:
    book = MemoryBook()
    here = once(book)
    first = await claim(here, said[0])
    twin = asyncio.ensure_future(claim(once(book), said[1]))
    asked = book.asked
    await eventually(lambda: book.asked > asked + 1, what="the twin has found the claim and looked again")
    here.withdraw(first)
    await settle(here)
    assert (await twin).decisions != first.decisions


@pytest.mark.parametrize("is_taken_over", [False, True])
@pytest.mark.parametrize("is_said_at_once", [False, True])
async def test_what_came_to_nothing_is_gone_and_what_was_entered_in_its_place_stays(
    is_said_at_once: bool, is_taken_over: bool
) -> None:
    """Several calls learn that a request came to nothing, and say so late and in any order: one of them runs anew."""
    book = MemoryBook()
    here = once(book)
    first = await claim(here, call(key="k"))
    if is_taken_over:
        await book.pass_s(OWNER_S)
        here.accepted(await claim(once(book), call(key="k")))
    here.accepted(first)
    await settle(here)
    there = once(book)
    joined = [await claim(there, call(key="k")) for _ in range(2)]
    if is_said_at_once:
        await there.renew(joined[0])
    else:
        there.void(joined[0])
        await settle(there)
    anew = await claim(there, call(key="k"))
    assert anew.is_ours
    there.accepted(anew)
    await settle(there)
    await there.renew(joined[1])
    here.void(first)
    await settle(here)
    later = await claim(once(book), call(key="k"))
    assert (later.is_ours, later.decisions) == (False, anew.decisions)


async def test_a_caller_that_leaves_while_its_claim_is_entered_leaves_none() -> None:
    book = MemoryBook()
    book.hold.clear()
    here = once(book)
    gone = asyncio.ensure_future(claim(here, call(key="k")))
    stays = asyncio.ensure_future(claim(here, call(key="other")))
    await eventually(lambda: book.asked)
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    book.hold.set()
    await stays
    await settle(here)
    assert len(book.rows) == 1


async def test_notes_are_kept_while_the_book_is_away_and_written_in_their_order() -> None:
    book = MemoryBook()
    writer = asyncio.ensure_future((notes := Notes(book)).run())
    new = entry(key="k")
    await book.enter([new])
    book.away = True
    notes.put(accepted(new))
    asked = book.asked
    await eventually(lambda: book.asked > asked, what="it was tried")
    assert notes.waiting == 1
    book.away = False
    await eventually(lambda: book.rows[0].accepted)
    notes.put(void(new))
    notes.put(accepted(new))
    await eventually(lambda: not book.rows)
    writer.cancel()
    with suppress(asyncio.CancelledError):
        await writer


@pytest.mark.parametrize("order", list(permutations([accepted, withdrawn, void], 2)))
async def test_two_notes_of_one_claim_come_to_the_same_together_as_one_after_the_other(order: tuple[Any, Any]) -> None:
    """Of a claim that was taken over: only then can both an acceptance and a refusal be told of it."""
    left = []
    for is_together in (True, False):
        book, new = MemoryBook(), entry(key="k")
        (standing,) = await book.enter([new])
        assert standing is not None
        assert await book.take_over(standing)
        notes = Notes(book)
        for said in order:
            notes.put(said(new))
            if not is_together:
                await notes.write()
        await notes.write()
        left.append([row.accepted for row in book.rows])
    assert left == ([[], []] if void in order else [[True], [True]])


async def test_a_note_that_could_not_be_written_is_kept_with_what_came_meanwhile() -> None:
    """The refusal of the call that was overtaken was on its way when the book went away."""
    book, new = MemoryBook(), entry(key="k")
    (standing,) = await book.enter([new])
    assert standing is not None
    assert await book.take_over(standing)
    notes = Notes(book)
    notes.put(withdrawn(new))
    book.hold.clear()
    asked, writing = book.asked, asyncio.ensure_future(notes.write())
    await eventually(lambda: book.asked > asked)
    notes.put(accepted(new))
    book.away = True
    book.hold.set()
    with pytest.raises(BookAway):
        await writing
    book.away = False
    await notes.write()
    assert [row.accepted for row in book.rows] == [True]


async def test_old_claims_are_let_go_of_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.once.pruning._SLICE", 2)
    monkeypatch.setattr("api.once.pruning._SLICE_PAUSE_S", 0)
    book = MemoryBook()
    await book.enter([entry(retry=0) for _ in range(5)])
    await book.pass_s(COUNTED_HORIZON_S + 1)
    await _let_go(book, is_keyed=False, older_than_s=COUNTED_HORIZON_S)
    assert book.rows == []


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_dies_refuses_or_repeats_a_key_is_run_once(seed: int) -> None:
    """Random calls with few keys at three processes, each dying or being refused at any point, while time passes.

    Some take longer than the owner of a claim has, and go on when another has taken theirs over.
    """
    rng = random.Random(seed)
    book = MemoryBook()
    processes = [once(book) for _ in range(3)]
    on_log: dict[str, set[Any]] = {}

    async def one(key: str) -> None:
        process = rng.choice(processes)
        made = await claim(process, call(key=key), deadline_s=600)
        end = rng.choice(["dies", "refused", "dies on the log", "runs"])
        if not made.is_ours or end == "dies":
            return
        goes_on_s = book.clock.now_s + rng.choice([0, 0, OWNER_S, 2 * OWNER_S])
        await asyncio.sleep(0)
        await eventually(lambda: book.clock.now_s >= goes_on_s)
        if end == "refused":
            process.withdraw(made)
            return
        on_log.setdefault(key, set()).add(made.decisions.request_id)
        if end == "runs":
            process.accepted(made)

    for _ in range(20):
        calls = [asyncio.ensure_future(one(f"k{rng.randrange(3)}")) for _ in range(6)]
        while not all(c.done() for c in calls):
            await asyncio.sleep(0.001)
            await settle(*processes)
            await book.pass_s(rng.choice([0, 0, 0.5]))
        await asyncio.gather(*calls)
    assert {key: len(ids) for key, ids in on_log.items()} == dict.fromkeys(on_log, 1)
