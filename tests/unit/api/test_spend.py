from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from api.admission.caller import Cap
from api.admission.demand import Demand, Spending
from api.errors import ApiError, PaymentRequired
from api.once.claims import Claim, Decisions
from api.spend.price_book import Price, PriceBook, PricesAway
from api.spend.spend import SETTLED_WITHIN, Account, Spend, cap_reached, month_of, shown
from schemas.ids import new_request_id
from tests.conditions import eventually
from tests.fakes import manifest
from tests.spending import BEGAN, STANDARD, FakeLedger, FakePrices, Time, capped, items, spend
from tests.unit.api.test_gate import World

MARCH = month_of(BEGAN)


def account(since: datetime = MARCH, currency: str = "usd", customer_id: str = "cust_a") -> Account:
    return Account(customer_id=customer_id, currency=currency, since=since)


async def ask(money: Spend, time: Time, cap: int | None = 10_000, **caller: str) -> Spending | None:
    return await money.spending(capped(cap, **caller), "standard-v1", items(3, tokens=50), time.now())


async def refusal(money: Spend, time: Time, cap: int = 10_000, **caller: str) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await ask(money, time, cap, **caller)
    return refused.value


async def test_a_customer_without_a_cap_asks_nobody() -> None:
    time = Time()
    ledger = FakeLedger(time)
    ledger.away = True
    assert await ask(spend(time, ledger), time, None) is None
    assert ledger.asked == []


async def test_what_is_left_is_the_cap_less_what_is_confirmed_and_the_call_costs_its_most() -> None:
    time = Time()
    ledger = FakeLedger(time)
    ledger.spent[account()] = 2_345
    found = await ask(spend(time, ledger), time)
    assert found == Spending(
        left_micros=10_000 - 2_345,
        settled_at=BEGAN,
        cost_micros=3 * 100 + 50 * 2,
        resets_at=datetime(2026, 4, 1, tzinfo=timezone.utc),
    )


@pytest.mark.parametrize("cap", [2_744, 1, 0])
async def test_a_call_that_the_confirmed_amount_leaves_no_room_for_is_refused_in_words(cap: int) -> None:
    time = Time()
    ledger = FakeLedger(time)
    ledger.spent[account()] = 2_345
    error = await refusal(spend(time, ledger), time, cap)
    assert (error.status, error.code) == (402, "spend_cap_reached")
    for word in (shown(cap), "USD", "2026-03", "0.002345", "0.0004", "2026-04-01T00:00Z", "higher cap"):
        assert word in error.message
    assert "Retry-After" not in error.headers
    assert (await ask(spend(time, ledger), time, 2_745)) is not None


async def test_a_reservation_that_is_in_the_way_is_told() -> None:
    ends = datetime(2027, 1, 1, tzinfo=timezone.utc)
    spending = Spending(left_micros=500, settled_at=BEGAN, cost_micros=400, resets_at=ends)
    error = cap_reached(Cap(amount_micros=1_000_000, currency="usd"), spending, reserved_micros=300)
    assert isinstance(error, PaymentRequired)
    assert "2026-12" in error.message
    assert "0.0003" in error.message
    # What is reserved passes within seconds; only what is spent lasts until the month ends.
    assert "call again in some seconds" in error.message
    assert "next month" not in error.message
    assert int(error.headers["Retry-After"]) >= 1
    error = cap_reached(
        Cap(amount_micros=1_000_000, currency="usd"), replace(spending, cost_micros=501), reserved_micros=300
    )
    assert "call again next month (from 2027-01-01T00:00Z)" in error.message
    assert "Retry-After" not in error.headers


def test_months_are_those_of_utc() -> None:
    ahead = timezone(timedelta(hours=5, minutes=30))
    assert month_of(datetime(2026, 3, 1, 2, tzinfo=ahead)) == datetime(2026, 2, 1, tzinfo=timezone.utc)
    for month in range(1, 13):
        a = account(datetime(2027, month, 1, tzinfo=timezone.utc))
        assert a.until == datetime(2027 + month // 12, month % 12 + 1, 1, tzinfo=timezone.utc)


async def test_a_call_is_of_the_month_of_its_admission_whenever_it_gets_here() -> None:
    time = Time()
    ledger = FakeLedger(time)
    april = datetime(2026, 4, 1, tzinfo=timezone.utc)
    ledger.spent[account()], ledger.spent[account(april)] = 9_990, 10
    time.s = (april - BEGAN).total_seconds() + 0.05
    ledger.says(time.now() - timedelta(seconds=14))
    money = spend(time, ledger)
    caller = capped(10_000)
    with pytest.raises(PaymentRequired, match="2026-03"):
        await money.spending(caller, "standard-v1", items(1), april - timedelta(milliseconds=100))
    found = await money.spending(caller, "standard-v1", items(1), april)
    assert found is not None
    assert found.left_micros == 9_990
    # Reservations know no month: those of March that are not settled yet count here, too.
    assert found.settled_at < april


@pytest.mark.parametrize("since", ["the ledger stopped", "postgres went away"])
async def test_a_word_older_than_the_stated_age_is_not_gone_by(since: str) -> None:
    time = Time()
    ledger = FakeLedger(time)
    money = spend(time, ledger, view_s=30)
    assert await ask(money, time) is not None
    if since == "postgres went away":
        ledger.away = True
    loop = asyncio.ensure_future(money.run())
    for s in range(1, 31):
        time.s = float(s)
        await asyncio.sleep(0)
        assert await ask(money, time) is not None, s
    time.s = 30.1
    error = await refusal(money, time)
    assert (error.status, error.code) == (503, "spend_unknown")
    assert int(error.headers["Retry-After"]) >= 1
    assert await ask(money, time, None) is None  # others do not notice
    ledger.away = False
    ledger.says(time.now() - timedelta(seconds=12))
    time.s += 1.1
    loop.cancel()
    money = spend(time, ledger) if since == "the ledger stopped" else money
    assert await ask(money, time) is not None


async def test_a_ledger_that_has_said_nothing_or_is_far_behind_is_not_gone_by() -> None:
    time = Time()
    ledger = FakeLedger(time)
    ledger.settled_at = None
    assert (await refusal(spend(time, ledger), time)).code == "spend_unknown"
    for behind, known in ((SETTLED_WITHIN, True), (SETTLED_WITHIN + timedelta(seconds=1), False)):
        ledger.says(time.now() - behind)
        if known:
            assert await ask(spend(time, ledger), time) is not None
        else:
            assert "behind" in (await refusal(spend(time, ledger), time)).message


async def test_amounts_that_nobody_can_name_are_not_guessed() -> None:
    time = Time()
    ledger = FakeLedger(time)
    euro = Price(price_id="standard-v1", currency="eur", amounts_micros={"items": 1})
    error = await refusal(spend(time, ledger, euro), time)
    assert (error.status, error.code) == (402, "spend_currency_differs")
    nobody = Price(price_id="another", currency="usd", amounts_micros={})
    assert (await refusal(spend(time, ledger, nobody), time)).code == "spend_unknown"
    ledger.unpriced = "made-up"
    error = await refusal(spend(time, ledger), time)
    assert error.code == "spend_unknown"
    assert "made-up" in error.message


async def test_calls_that_come_at_once_are_one_read_and_wait_no_longer_than_it() -> None:
    time = Time()
    ledger = FakeLedger(time)
    ledger.hold.clear()
    money = spend(time, ledger)
    calls = [asyncio.ensure_future(ask(money, time)) for _ in range(20)]
    await eventually(lambda: len(ledger.asked) == 1)
    for _ in range(20):
        await asyncio.sleep(0)  # the others are there by now
    calls[0].cancel()
    ledger.hold.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(f, Spending) for f in found[1:])
    assert len(ledger.asked) == 1


async def test_while_it_cannot_be_read_one_call_in_a_while_finds_out() -> None:
    time = Time()
    ledger = FakeLedger(time)
    ledger.away = True
    money = spend(time, ledger)
    for _ in range(10):
        assert "switched off" in (await refusal(money, time)).message
    assert len(ledger.asked) == 1
    time.s += 1.0
    ledger.away = False
    assert await ask(money, time) is not None
    assert money.counts["spend_unknown"] == 10


async def test_it_reads_for_whoever_calls_and_no_longer() -> None:
    time, slept = Time(), asyncio.Queue[float]()
    ledger = FakeLedger(time)
    pass_on = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.put_nowait(seconds)
        await pass_on.wait()
        pass_on.clear()

    money = Spend(ledger, PriceBook(FakePrices(STANDARD)), view_s=30, clock=time.clock, now=time.now, sleep=sleep)
    for n in range(120):
        await ask(money, time, customer_id=f"c{n}")
    await ask(money, time, None, customer_id="without")
    ledger.asked.clear()
    loop = asyncio.ensure_future(money.run())
    assert await slept.get() == 0.7
    assert [len(a) for a in ledger.asked] == [20] * 6
    time.s = 59.0
    ledger.says(time.now())
    await ask(money, time, customer_id="c7")
    ledger.asked.clear()
    time.s = 61.0
    pass_on.set()
    await slept.get()
    assert [[a.customer_id for a in read] for read in ledger.asked] == [["c7"]]
    loop.cancel()


async def test_an_answer_that_was_asked_for_earlier_does_not_replace_a_later_one() -> None:
    time = Time()
    ledger = FakeLedger(time)
    money = spend(time, ledger)
    await ask(money, time)
    ledger.hold.clear()
    slow = asyncio.ensure_future(money._read([account()], within_s=1))
    await asyncio.sleep(0)
    ledger.hold.set()
    time.s += 1
    ledger.spent[account()] = 7
    await money._read([account()], within_s=1)
    ledger.spent[account()] = 3
    await slow
    found = await ask(money, time)
    assert found is not None
    assert found.left_micros == 10_000 - 7


async def test_an_entry_is_read_once_and_one_that_is_missing_not_all_the_time() -> None:
    time, prices = Time(), FakePrices(STANDARD)
    book = PriceBook(prices, clock=time.clock)
    found = await asyncio.gather(*(book.find("standard-v1") for _ in range(10)))
    assert set(map(id, found)) == {id(STANDARD)}
    assert await book.find("new") is None
    assert await book.find("new") is None
    assert prices.asked == ["standard-v1", "new"]
    prices.entries["new"] = Price(price_id="new", currency="usd", amounts_micros={"tokens": 2**62})
    time.s += 1.0
    new = await book.find("new")
    assert new is not None
    assert new.of(items(1, tokens=10**6)) == 10**6 * 2**62  # whole numbers, however large
    prices.away = True
    with pytest.raises(PricesAway):
        await book.find("third")
    assert (await refusal(Spend(FakeLedger(time), PriceBook(prices), view_s=30), time)).code == "spend_unknown"


@pytest.mark.parametrize(
    ("micros", "words"), [(0, "0.00"), (12_500_000, "12.50"), (512, "0.000512"), (-1_000_001, "-1.000001")]
)
def test_amounts_are_shown_with_all_their_digits(micros: int, words: str) -> None:
    assert shown(micros) == words


def test_no_amount_is_too_large_for_the_limiter() -> None:
    async def find() -> Spending | None:
        time = Time()
        return await ask(spend(time, FakeLedger(time)), time, 2**63 - 1)

    found = asyncio.run(find())
    assert found is not None
    assert found.left_micros < 2**53


class Taken(Exception):
    """The limiter was asked."""


async def test_a_call_that_takes_over_an_earlier_one_is_of_its_month_and_is_reserved_as_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its request is on the log only from now on, so the ledger is not past it before."""
    world, time, asked = World(), Time(), list[Demand]()
    ledger = FakeLedger(time)
    time.s = 9.0
    ledger.says(time.now() - timedelta(seconds=1))
    earlier = Decisions(
        request_id=new_request_id(),
        admitted_at=BEGAN,
        deadline_at=BEGAN + timedelta(seconds=10),
        version=manifest().version,
        price_id="standard-v1",
    )
    claim = Claim(is_keyed=True, retries=0, decisions=earlier, is_ours=True, is_taken_over=True)
    gate = await world.gate()
    gate._now = time.now
    gate._money = spend(time, ledger)
    key = world.keys.records[world.key.key_id]
    world.keys.records[world.key.key_id] = replace(
        key, customer=replace(key.customer, cap=Cap(amount_micros=10_000, currency="usd"))
    )

    async def find(*_: object) -> Claim:
        return claim

    async def take(demand: Demand) -> None:
        asked.append(demand)
        raise Taken

    monkeypatch.setattr(gate, "_claim", find)
    monkeypatch.setattr(gate._limiter, "take", take)
    with pytest.raises(Taken):
        async with gate.admitted(world, new_request_id()):
            pass
    assert asked[0].admitted_at == time.now()
    assert asked[0].request_id == earlier.request_id
    assert asked[0].spending is not None
    assert asked[0].spending.settled_at == time.now() - timedelta(seconds=1)
