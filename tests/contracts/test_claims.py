"""One suite for the book of claims in memory and the one in Postgres: what a claim promises, whoever keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from api.once.book import PostgresBook
from api.once.claims import COUNTED_HORIZON_S, LOST_S, REFUSED_S, Book, BookAway, Entry, Sameness, Standing
from infra.postgres import Pool, open_pool
from infra.settings import PostgresSettings
from infra.turns import Turn
from schemas.ids import new_request_id
from tests.claims import MemoryBook, accepted, call, decisions, entry, void, withdrawn
from tests.conftest import _clone, _drop, dsn_for, run_apart
from tests.processes import free_port


class AgedBook(PostgresBook):
    """The real one; time passes by making all that it holds older."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._rows = pool

    async def pass_s(self, seconds: float) -> None:
        older = ", ".join(f"{c} = {c} - $1::interval" for c in ("entered_at", "seen_at", "answered_at"))
        await self._rows.execute(f"UPDATE claims SET {older}", timedelta(seconds=seconds))


@asynccontextmanager
async def _books(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    if kind == "memory":
        yield MemoryBook()
        return
    async with open_pool(PostgresSettings(dsn=request.getfixturevalue("dsn")), max_size=8) as pool:
        await pool.execute("TRUNCATE claims")
        yield AgedBook(pool)


@pytest.fixture(scope="module")
def dsn(servers: dict[str, str]) -> Iterator[str]:
    """One database for all of these: they need nothing else."""
    server, name = servers["INFERLOG_POSTGRES_DSN"], f"claims_{uuid4().hex[:8]}"
    run_apart(_clone(server, name))
    yield dsn_for(server, name)
    run_apart(_drop(server, name))


@pytest.fixture(params=["memory", "postgres"])
async def book(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with _books(request.param, request) as book:
        yield book


async def enter(book: Book, new: Entry) -> Standing:
    (standing,) = await book.enter([new])
    assert standing is not None
    return standing


def ids(standings: list[Standing | None]) -> list[Any]:
    return [None if s is None else s.decisions.request_id for s in standings]


async def test_a_key_is_taken_once_whoever_comes_and_the_first_ones_decisions_are_given(book: Any) -> None:
    first, later, other = entry(key="k"), entry(key="k", body=b"b"), entry(key="k", customer_id="cust_b")
    standing = await enter(book, first)
    assert (standing.decisions, standing.is_accepted, standing.takeovers) == (first.decisions, False, 0)
    found = await enter(book, later)
    assert (found.decisions, found.digest) == (first.decisions, first.digest)
    assert ids(await book.enter([other, entry(key="k")])) == [
        other.decisions.request_id,
        first.decisions.request_id,
    ]


async def test_of_many_that_enter_one_key_at_once_exactly_one_is_first(book: Any) -> None:
    """In batches that overlap crosswise, and twice within one."""
    batches = [[entry(key=f"k{n}") for n in order] for order in ([0, 1, 2, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1])]
    found = await asyncio.gather(*(book.enter(batch) for batch in batches))
    by_name: dict[bytes, set[Any]] = {}
    for batch, standings in zip(batches, found, strict=True):
        for one, request_id in zip(batch, ids(standings), strict=True):
            by_name.setdefault(one.name, set()).add(request_id)
    assert [len(firsts) for firsts in by_name.values()] == [1, 1, 1]


async def test_a_statement_whose_answer_was_lost_may_be_repeated(book: Any) -> None:
    for new in (entry(key="k"), entry(retry=0)):
        assert ids([await enter(book, new), await enter(book, new)]) == [new.decisions.request_id] * 2


async def test_equal_calls_without_a_key_are_calls_of_their_own(book: Any) -> None:
    calls = [entry(retry=0) for _ in range(3)]
    assert ids(await book.enter(calls)) == [c.decisions.request_id for c in calls]
    assert await book.rejoin(entry(retry=0)) is None


async def test_equal_calls_that_are_both_repeated_join_different_ones(book: Any) -> None:
    """Also when both repetitions come at once."""
    calls = [entry(retry=0), entry(retry=0)]
    await book.enter(calls)
    joined = await asyncio.gather(*(book.rejoin(entry(retry=1)) for _ in range(3)))
    assert sorted(map(str, ids(list(joined)))) == sorted(map(str, [*(c.decisions.request_id for c in calls), None]))
    again = await asyncio.gather(*(book.rejoin(entry(retry=2)) for _ in range(2)))
    assert set(ids(list(again))) == {c.decisions.request_id for c in calls}


async def test_of_several_calls_a_repetition_is_of_the_one_that_was_repeated_before(book: Any) -> None:
    """Or the other's first repetition would find none that has seen fewer, and be a third charge."""
    older, newer = entry(retry=0), entry(retry=0)
    await enter(book, older)
    assert ids([await book.rejoin(entry(retry=1))]) == [older.decisions.request_id]
    await enter(book, newer)
    await book.note([accepted(older), accepted(newer)])
    assert ids([await book.rejoin(entry(retry=2))]) == [older.decisions.request_id]
    assert ids([await book.rejoin(entry(retry=1))]) == [newer.decisions.request_id]


async def test_a_repetition_is_of_the_same_key_and_the_same_body(book: Any) -> None:
    await enter(book, entry(retry=0))
    assert await book.rejoin(entry(retry=1, body=b"b")) is None
    assert await book.rejoin(entry(retry=1, key_id="key_b")) is None
    assert await book.rejoin(entry(retry=1)) is not None


async def test_a_call_with_a_key_is_not_what_a_counted_one_repeats(book: Any) -> None:
    await enter(book, entry(key="k", retry=0))
    assert await book.rejoin(entry(retry=1)) is None


@pytest.mark.parametrize(
    ("patience_s", "answered_after_s", "comes_after_s", "is_found"),
    [
        (0.0, None, COUNTED_HORIZON_S - 1, True),  # never answered
        (0.0, None, COUNTED_HORIZON_S + 1, False),
        (0.0, 1.0, 1 + LOST_S - 0.5, True),  # answered, and lost on its way
        (0.0, 1.0, 1 + LOST_S + 1, False),
        (60.0, 1.0, 59.0, False),  # its client would still wait
        (60.0, 1.0, 60.5, True),  # it has just given up
        (60.0, 1.0, 60 + LOST_S - 0.5, True),
        (60.0, 1.0, 60 + LOST_S + 1, False),
    ],
)
async def test_how_long_after_an_answer_a_call_may_be_its_repetition(
    book: Any, patience_s: float, answered_after_s: float | None, comes_after_s: float, is_found: bool
) -> None:
    first = entry(retry=0, patience_s=patience_s)
    await enter(book, first)
    await book.note([accepted(first)])
    if answered_after_s is not None:
        await book.pass_s(answered_after_s)
        await book.note([accepted(first, answered=True)])
    await book.pass_s(comes_after_s - (answered_after_s or 0))
    assert (await book.rejoin(entry(retry=1)) is not None) is is_found


async def test_an_answer_counts_for_the_call_it_was_given_to(book: Any) -> None:
    """The first call's answer is written down after its repetition came: that one has none yet."""
    first = entry(retry=0)
    await enter(book, first)
    assert await book.rejoin(entry(retry=1)) is not None
    await book.note([accepted(first, answered=True)])
    await book.pass_s(LOST_S + 1)
    assert await book.rejoin(entry(retry=2)) is not None


@pytest.mark.parametrize("new", [entry(key="k"), entry(retry=0)], ids=["keyed", "counted"])
async def test_a_claim_is_taken_over_by_one_and_not_once_it_is_accepted(book: Any, new: Entry) -> None:
    standing = await enter(book, new)
    await book.pass_s(5)
    standing = await book.find(standing)
    assert standing.quiet_s >= 5
    assert sorted(await asyncio.gather(*(book.take_over(standing) for _ in range(4)))) == [False, False, False, True]
    after = await book.find(standing)
    assert (after.decisions, after.takeovers) == (new.decisions, 1)
    assert after.quiet_s < 5 <= after.age_s
    await book.note([accepted(new)])
    after = await book.find(standing)
    assert after.is_accepted
    assert not await book.take_over(after)


@pytest.mark.parametrize("gone", [withdrawn, void])
@pytest.mark.parametrize(("first", "later"), [(entry(key="k"), entry(key="k")), (entry(retry=0), entry(retry=1))])
async def test_what_was_withdrawn_or_is_void_is_not_there(book: Any, first: Entry, later: Entry, gone: Any) -> None:
    standing = await enter(book, first)
    await book.note([gone(first), accepted(entry(retry=0))])
    assert await book.find(standing) is None
    assert await book.rejoin(later) is None
    assert (await enter(book, later)).decisions == later.decisions


async def answered_and_refused(book: Book, *, refused: int = 1) -> tuple[Entry, list[Entry]]:
    """Equal calls: one that was just answered, and later ones that were refused."""
    first, others = entry(retry=0), [entry(retry=0) for _ in range(refused)]
    await book.enter([first, *others])
    await book.note([accepted(first, answered=True), *map(withdrawn, others)])
    return first, others


async def test_the_repetition_of_a_refused_call_is_a_first_call_beside_one_that_was_answered(book: Any) -> None:
    """Two equal calls are two charges. As the refused one is used up, whoever comes next repeats the answered one."""
    first, _ = await answered_and_refused(book)
    assert await book.rejoin(entry(retry=1)) is None
    assert ids([await book.rejoin(entry(retry=1))]) == [first.decisions.request_id]


async def test_of_many_repetitions_as_many_are_first_calls_as_were_refused(book: Any) -> None:
    """Also when all come at once."""
    first, _ = await answered_and_refused(book, refused=2)
    came = await asyncio.gather(*(book.rejoin(entry(retry=1)) for _ in range(3)))
    assert sorted(map(str, ids(list(came)))) == sorted(map(str, [None, None, first.decisions.request_id]))


async def test_a_call_that_is_refused_again_and_again_stays_a_first_call(book: Any) -> None:
    """Also beside another that was refused less often, whose turn stays its own."""
    first, _ = await answered_and_refused(book)
    for retry in (1, 2):
        again = entry(retry=retry)
        assert await book.rejoin(again) is None
        await enter(book, again)
        await enter(book, other := entry(retry=0))
        await book.note([withdrawn(again), withdrawn(other)])
    for retry in (3, 1, 1):
        assert await book.rejoin(entry(retry=retry)) is None
    assert ids([await book.rejoin(entry(retry=1))]) == [first.decisions.request_id]


async def test_a_call_that_was_not_answered_is_repeated_before_one_that_was_refused(book: Any) -> None:
    """Its client is certain to come back: what it repeats is run, and would be billed twice."""
    first, refused = entry(retry=0), entry(retry=0)
    await book.enter([first, refused])
    await book.note([accepted(first), withdrawn(refused)])
    assert ids([await book.rejoin(entry(retry=1))]) == [first.decisions.request_id]
    assert await book.rejoin(entry(retry=1)) is None


@pytest.mark.parametrize("changes", [{"body": b"b"}, {"key_id": "key_b"}, {"customer_id": "cust_b"}])
async def test_only_its_own_repetition_uses_a_refused_call_up(book: Any, changes: dict[str, Any]) -> None:
    first, _ = await answered_and_refused(book)
    assert await book.rejoin(entry(retry=1, **changes)) is None
    assert await book.rejoin(entry(retry=0)) is None
    assert await book.rejoin(entry(retry=1)) is None
    assert ids([await book.rejoin(entry(retry=1))]) == [first.decisions.request_id]


@pytest.mark.parametrize(("comes_after_s", "is_first"), [(REFUSED_S - 1, True), (REFUSED_S + 1, False)])
async def test_how_long_after_a_refusal_a_call_may_be_its_repetition(
    book: Any, comes_after_s: float, is_first: bool
) -> None:
    await enter(book, refused := entry(retry=0))
    await book.note([withdrawn(refused)])
    await book.pass_s(comes_after_s)
    await enter(book, first := entry(retry=0))
    await book.note([accepted(first, answered=True)])
    assert ids([await book.rejoin(entry(retry=1))]) == [None if is_first else first.decisions.request_id]


async def test_a_refused_call_whose_repetition_waits_already_is_not_repeated_by_another(book: Any) -> None:
    """The one that waits enters itself; its own repetitions must find that, not the refused call."""
    await enter(book, slow := entry(retry=0))
    waits = await book.rejoin(entry(retry=1))
    assert ids([waits]) == [slow.decisions.request_id]
    await book.note([withdrawn(slow)])
    assert await book.find(waits) is None
    await enter(book, anew := entry(retry=1))
    await book.note([accepted(anew, answered=True)])
    assert ids([await book.rejoin(entry(retry=2))]) == [anew.decisions.request_id]


async def test_a_claim_is_either_joined_or_used_up_when_it_is_withdrawn_at_the_same_time(book: Any) -> None:
    """Either way it has ended then, and the repetition need not wait until its owner is taken for dead."""
    for n in range(10):
        body = bytes([n])
        standing = await enter(book, slow := entry(retry=0, body=body))
        await asyncio.gather(book.rejoin(entry(retry=1, body=body)), book.note([withdrawn(slow)]))
        assert await book.find(standing) is None
        assert not await book.take_over(standing)


async def test_refused_calls_are_let_go_of_sooner(book: Any) -> None:
    """They cost their sender nothing, and may be many."""
    kept, refused = (aged(entry(retry=0), REFUSED_S + 60) for _ in range(2))
    await book.enter([kept, refused])
    await book.note([withdrawn(refused)])
    assert await book.prune(is_keyed=False, older_than_s=COUNTED_HORIZON_S, at_most=10) == 0
    await book.pass_s(REFUSED_S + 1)
    assert await book.prune(is_keyed=False, older_than_s=COUNTED_HORIZON_S, at_most=10) == 1
    assert ids([await book.rejoin(entry(retry=1))]) == [kept.decisions.request_id]


@pytest.mark.parametrize("new", [entry(key="k"), entry(retry=0)], ids=["keyed", "counted"])
@pytest.mark.parametrize(("is_taken_over", "is_accepted"), [(True, False), (False, True), (True, True)])
async def test_what_another_call_took_over_or_is_accepted_cannot_be_withdrawn_and_only_be_void(
    book: Any, new: Entry, is_taken_over: bool, is_accepted: bool
) -> None:
    standing, refused = await enter(book, new), entry(key="refused")
    await enter(book, refused)
    if is_taken_over:
        assert await book.take_over(standing)
    if is_accepted:
        await book.note([accepted(new)])
    await book.note([withdrawn(new), withdrawn(refused)])
    after = await book.find(standing)
    assert (after.decisions, after.takeovers, after.is_accepted) == (new.decisions, int(is_taken_over), is_accepted)
    again = entry(key="refused")
    assert (await enter(book, again)).decisions == again.decisions
    await book.note([void(new), withdrawn(again)])
    assert await book.find(standing) is None


@pytest.mark.parametrize("said", [{"key": "k"}, {"retry": 0}], ids=["keyed", "counted"])
async def test_a_claim_is_either_taken_over_or_withdrawn(book: Any, said: dict[str, Any]) -> None:
    """Whichever comes first, when both come at once."""
    for _ in range(10):
        new = entry(**said)
        standing = await enter(book, new)
        taken, _ = await asyncio.gather(book.take_over(standing), book.note([withdrawn(new)]))
        assert (await book.find(standing) is not None) is taken
        await book.note([void(new)])


async def test_what_was_entered_in_place_of_a_void_claim_is_another(book: Any) -> None:
    first, anew = entry(key="k"), entry(key="k")
    await enter(book, first)
    await book.note([void(first)])
    standing = await enter(book, anew)
    await book.note([void(first)])
    await book.note([withdrawn(first)])
    assert (await book.find(standing)).decisions == anew.decisions


async def test_only_what_nobody_can_come_back_to_is_let_go_of(book: Any) -> None:
    hour_s = 3600.0
    old_keyed, old_counted, patient = entry(key="old"), entry(retry=0), entry(retry=0, patience_s=900.0)
    # Their ids are as old as they are.
    old = [aged(e, 2 * hour_s) for e in (old_keyed, old_counted, patient)]
    await book.enter(old)
    await book.pass_s(COUNTED_HORIZON_S + 1)
    new = [entry(key="new"), entry(retry=0)]
    await book.enter(new)
    assert await book.prune(is_keyed=False, older_than_s=COUNTED_HORIZON_S, at_most=10) == 1
    assert await book.prune(is_keyed=True, older_than_s=hour_s, at_most=10) == 0
    await book.pass_s(hour_s)
    assert await book.prune(is_keyed=True, older_than_s=hour_s, at_most=10) == 1
    assert await book.prune(is_keyed=False, older_than_s=COUNTED_HORIZON_S, at_most=1) == 1
    assert (await enter(book, entry(key="new"))).decisions == new[0].decisions
    assert (again := entry(key="old")).decisions == (await enter(book, again)).decisions


async def test_one_process_at_a_time_lets_go_of_claims(dsn: str) -> None:
    async with open_pool(PostgresSettings(dsn=dsn)) as pool, pool.acquire() as other:
        await other.fetchval("SELECT pg_advisory_lock($1)", Turn.CLAIMS)
        assert await PostgresBook(pool).prune(is_keyed=True, older_than_s=1, at_most=10) is None
        await other.fetchval("SELECT pg_advisory_unlock($1)", Turn.CLAIMS)
        assert await PostgresBook(pool).prune(is_keyed=True, older_than_s=1, at_most=10) == 0


async def test_a_book_that_cannot_be_reached_says_so() -> None:
    nobody = PostgresSettings(dsn=f"postgresql://u:p@127.0.0.1:{free_port()}/x")
    async with open_pool(nobody) as pool:
        book, new = PostgresBook(pool), entry(retry=1)
        for ask in (book.enter([new]), book.rejoin(new), book.note([accepted(new)]), book.note([withdrawn(new)])):
            with pytest.raises(BookAway):
                await ask


def aged(new: Entry, age_s: float) -> Entry:
    """The same with an id that was made earlier."""
    now_ns = int((new.decisions.admitted_at.timestamp() - age_s) * 1e9)
    decided = decisions()
    decided = type(decided)(**{**_fields(decided), "request_id": new_request_id(now_ns=now_ns)})
    return Entry.of(_said(new), decided)


def _fields(decided: Any) -> dict[str, Any]:
    return {name: getattr(decided, name) for name in decided.__slots__}


def _said(new: Entry) -> Sameness:
    return call(key="old" if new.is_keyed else None, retry=None if new.is_keyed else 0, patience_s=new.patience_s)
