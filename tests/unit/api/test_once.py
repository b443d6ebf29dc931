from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest

from api.errors import Unavailable, Unprocessable
from api.once.claims import OWNER_S, BookAway, Sameness
from schemas.ids import new_request_id
from tests.claims import HORIZON_S, MemoryBook, call, claim, once, settle
from tests.conditions import eventually


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
    (done,), (waits,) = await asyncio.wait(twins, timeout=30, return_when=asyncio.FIRST_COMPLETED)
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


async def test_equal_calls_of_which_some_are_refused_first_are_requests_of_their_own() -> None:
    """At one call a second: the first is answered, the others are refused and repeated until there is room again."""
    book = MemoryBook()
    here = once(book)
    first = await claim(here, call(retry=0))
    here.accepted(first)
    here.answered(first)
    ran = {first.decisions.request_id}
    for refusals in (1, 3):
        for retry in range(refusals):
            refused = await claim(here, call(retry=retry))
            assert refused.is_ours
            here.withdraw(refused)
            await settle(here)
        passed = await claim(once(book), call(retry=refusals))
        assert passed.is_ours
        here.accepted(passed)
        here.answered(passed)
        await settle(here)
        ran.add(passed.decisions.request_id)
    assert len(ran) == 3


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_is_refused_how_often_equal_calls_are_as_many_requests(seed: int) -> None:
    """Random clients with one body, each repeating its call until it passes; every try is answered in whole."""
    rng = random.Random(seed)
    book = MemoryBook()
    processes = [once(book) for _ in range(2)]
    tries, ran = dict.fromkeys(range(8), 0), []
    while tries:
        client, process = rng.choice(list(tries)), rng.choice(processes)
        made = await claim(process, call(retry=tries[client]))
        assert made.is_ours, f"seed {seed}: try {tries[client]} of {client} was taken for another's"
        if rng.random() < 0.6:
            process.withdraw(made)
            tries[client] += 1
        else:
            process.accepted(made)
            process.answered(made)
            ran.append(made.decisions.request_id)
            del tries[client]
        await settle(process)
        await book.pass_s(rng.choice([0, 0.1, 1]))
    assert len(set(ran)) == 8
    assert not [r for r in book.rows if r.withdrawn]


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
