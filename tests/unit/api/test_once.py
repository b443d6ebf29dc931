from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

from api.errors import Unavailable, Unprocessable
from api.once.batches import Notes
from api.once.claims import COUNTED_HORIZON_S, OWNER_S, BookAway, Claim, Note, Sameness
from api.once.once import Once
from api.once.pruning import _let_go
from schemas.ids import new_request_id
from tests.claims import MemoryBook, accepted, call, decisions, entry
from tests.conditions import eventually

HORIZON_S = 3600.0


def once(book: MemoryBook) -> Once:
    """One process's."""
    return Once(book, horizon_s=HORIZON_S)


async def claim(by: Once, said: Sameness, **decided: Any) -> Claim:
    return await by.claim(said, decisions(**decided))


async def settle(*processes: Once) -> None:
    """What became of claims is written."""
    for one in processes:
        await one._notes.write()


async def test_the_first_call_with_a_key_is_ours_and_later_ones_are_given_its_request_in_any_process() -> None:
    book = MemoryBook()
    here, there = once(book), once(book)
    first = await claim(here, call(key="k"), version="old")
    assert (first.is_ours, first.decisions.version) == (True, "old")
    here.accepted(first)
    await settle(here)
    for process in (here, there):
        later = await claim(process, call(key="k"), version="new")
        assert (later.is_ours, later.decisions) == (False, first.decisions)


async def test_a_key_with_another_call_is_refused_and_another_customers_key_is_another() -> None:
    book = MemoryBook()
    await claim(once(book), call(key="k"))
    with pytest.raises(Unprocessable) as refused:
        await claim(once(book), call(key="k", body=b"b"))
    assert refused.value.code == "idempotency_key_reused"
    assert (await claim(once(book), call(key="k", customer_id="cust_b"))).is_ours


async def test_a_twin_waits_until_the_first_is_accepted() -> None:
    book = MemoryBook()
    here, there = once(book), once(book)
    first = await claim(here, call(key="k"))
    twin = asyncio.ensure_future(claim(there, call(key="k")))
    asked = book.asked
    await eventually(lambda: book.asked >= asked + 3, what="the twin has entered itself and looked again, twice")
    assert not twin.done()
    here.accepted(first)
    await settle(here)
    assert (await twin).decisions == first.decisions


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


@pytest.mark.parametrize("said", [(call(key="k"), call(key="k")), (call(retry=0), call(retry=1))])
async def test_of_the_twins_of_a_call_whose_process_died_one_goes_on_with_what_was_decided(
    said: tuple[Sameness, Sameness],
) -> None:
    book = MemoryBook()
    first = await claim(once(book), said[0], version="old", deadline_s=60)
    await book.pass_s(OWNER_S)
    there = once(book)
    twins = [asyncio.ensure_future(claim(there, said[1], version="new")) for _ in range(1 + 3 * said[0].is_keyed)]
    (taken,) = (await asyncio.wait(twins, return_when=asyncio.FIRST_COMPLETED))[0]
    found = taken.result()
    assert (found.is_ours, found.is_taken_over, found.decisions) == (True, True, first.decisions)
    there.accepted(found)
    await settle(there)
    others = [t for t in twins if t is not taken]
    assert [(c.is_ours, c.decisions) for c in await asyncio.gather(*others)] == [(False, first.decisions)] * len(others)


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


async def test_past_its_deadline_a_request_is_not_published_again_but_looked_for() -> None:
    book = MemoryBook()
    first = await claim(once(book), call(key="k"), deadline_s=0.1)
    await book.pass_s(OWNER_S)
    later = await claim(once(book), call(key="k"))
    assert (later.is_ours, later.decisions) == (False, first.decisions)


async def test_past_the_horizon_a_key_is_new_also_with_another_body() -> None:
    book = MemoryBook()
    here = once(book)
    first = await claim(here, call(key="k"))
    here.accepted(first)
    await settle(here)
    await book.pass_s(HORIZON_S - 1)
    assert not (await claim(here, call(key="k"))).is_ours
    await book.pass_s(1)
    twins = [asyncio.ensure_future(claim(once(book), call(key="k", body=b"b"))) for _ in range(2)]
    (done,), (waits,) = await asyncio.wait(twins, return_when=asyncio.FIRST_COMPLETED)
    new = done.result()
    assert new.is_ours
    assert new.decisions.request_id != first.decisions.request_id
    waits.cancel()
    with suppress(asyncio.CancelledError):
        await waits


async def test_repetitions_are_folded_and_equal_calls_are_not() -> None:
    book = MemoryBook()
    here = once(book)
    a, b = await claim(here, call(retry=0)), await claim(here, call(retry=0))
    assert a.is_ours
    assert b.is_ours
    for one in (a, b):
        here.accepted(one)
    await settle(here)
    again = [await claim(once(book), call(retry=1)) for _ in range(3)]
    assert [c.is_ours for c in again] == [False, False, True], "the third repeats a call that never came"
    assert {c.decisions.request_id for c in again[:2]} == {a.decisions.request_id, b.decisions.request_id}


async def test_a_call_that_sends_a_key_and_a_count_is_known_by_its_key() -> None:
    book = MemoryBook()
    here = once(book)
    first = await claim(here, call(key="k", retry=0))
    here.accepted(first)
    await settle(here)
    for retry in (0, 1, 7):
        assert (await claim(here, call(key="k", retry=retry))).decisions == first.decisions


async def test_calls_that_come_together_share_a_statement() -> None:
    book = MemoryBook()
    book.hold.clear()
    here = once(book)
    calls = [asyncio.ensure_future(claim(here, call(retry=0))) for _ in range(400)]
    await eventually(lambda: book.asked)
    book.hold.set()
    assert all(c.is_ours for c in await asyncio.gather(*calls))
    assert len(book.entered) <= 4
    assert max(book.entered) > 100


async def test_without_the_book_only_calls_that_never_came_before_are_let_through_and_entered_later() -> None:
    book = MemoryBook()
    book.away = True
    here = once(book)
    for said in (call(key="k"), call(retry=1)):
        with pytest.raises(Unavailable) as refused:
            await claim(here, said)
        assert refused.value.code == "claims_away"
        assert "Retry-After" in refused.value.headers
    first = await claim(here, call(retry=0))
    assert first.is_ours
    here.accepted(first)
    here.answered(first)
    assert here.counts["claims_entered_late"] == 1
    assert here.trouble() is not None
    with pytest.raises(BookAway):
        await settle(here)
    book.away = False
    await settle(here)
    again = await claim(once(book), call(retry=1))
    assert (again.is_ours, again.decisions) == (False, first.decisions)


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
    notes.put(Note(is_keyed=True, request_id=new.decisions.request_id, retries=0, withdrawn=True))
    notes.put(accepted(new))
    await eventually(lambda: not book.rows)
    writer.cancel()
    with suppress(asyncio.CancelledError):
        await writer


async def test_an_unforeseen_error_leaves_nobody_waiting() -> None:
    class Broken(MemoryBook):
        async def enter(self, entries: Any) -> Any:
            await super().enter(entries)
            raise ZeroDivisionError

    here = once(Broken())
    for _ in range(2):
        assert (await claim(here, call(retry=0))).is_ours
        with pytest.raises(Unavailable):
            await claim(here, call(key=str(new_request_id())))


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
    """Random calls with few keys at three processes, each dying or being refused at any point, while time passes."""
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
        await asyncio.sleep(0)
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
