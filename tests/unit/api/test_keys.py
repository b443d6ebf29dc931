from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from api.access import key_shape
from api.access import keys as module
from api.access.key_record import KeyRecord, Terms, base_rate
from api.access.key_shape import bearer, digest, key_id_of, mint
from api.access.keys import Keys, KeySourceAway
from api.errors import Unauthorized, Unavailable
from tests.conditions import eventually
from tests.fakes import Clock, FakeKeys

NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)


@pytest.fixture
def source() -> FakeKeys:
    return FakeKeys()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def known(source: FakeKeys, clock: Clock) -> Keys:
    return Keys(source, environment="test", clock=clock, now=lambda: NOW)


def test_a_minted_key_has_the_documented_shape_and_only_its_digest_is_stored() -> None:
    minted = mint("prod")
    prefix, environment, key_id, rest = minted.secret.split("_")
    assert (prefix, environment, key_id) == ("il", "prod", minted.key_id)
    assert len(rest) == 43 + 8
    assert minted.secret_sha256 == digest(minted.secret)
    assert key_id_of(minted.secret, "prod") == minted.key_id
    assert mint("prod").secret != minted.secret


def test_every_single_changed_character_is_refused_without_a_lookup() -> None:
    key = mint("test").secret
    for at in range(len(key)):
        typo = key[:at] + ("x" if key[at] != "x" else "y") + key[at + 1 :]
        with pytest.raises(Unauthorized):
            key_id_of(typo, "test")
    for shorter in (key[:-1], key[1:], key + "0", ""):
        with pytest.raises(Unauthorized):
            key_id_of(shorter, "test")


def test_a_key_of_another_environment_is_refused_by_name() -> None:
    with pytest.raises(Unauthorized, match="environment 'live'"):
        key_id_of(mint("live").secret, "test")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "il_test_x"])
def test_headers_without_a_bearer_key(header: str | None) -> None:
    with pytest.raises(Unauthorized, match="Authorization: Bearer"):
        bearer(header)


def test_the_scheme_is_case_insensitive() -> None:
    assert bearer("bearer abc") == "abc"


async def test_a_known_key_counts_for_a_second_without_a_word(source: FakeKeys, known: Keys, clock: Clock) -> None:
    key = source.add()
    for _ in range(3):
        assert (await known.identify(f"Bearer {key.secret}")).key_id == key.key_id
    assert source.lookups == 1
    clock.now_s += module.FRESH_S + 0.1
    await known.identify(f"Bearer {key.secret}")
    assert source.lookups == 2


async def test_a_wrong_secret_with_a_right_checksum_is_unknown(source: FakeKeys, known: Keys) -> None:
    key, other = source.add(), mint("test")
    start = key.secret[: len("il_test_") + 13] + other.secret[len("il_test_") + 13 : -8]
    forged = start + key_shape._checksum(start)
    assert key_id_of(forged, "test") == key.key_id
    with pytest.raises(Unauthorized, match="unknown key"):
        await known.identify(f"Bearer {forged}")


async def test_unknown_keys_are_remembered_for_a_second(source: FakeKeys, known: Keys, clock: Clock) -> None:
    key = stranger()
    for _ in range(3):
        with pytest.raises(Unauthorized, match="unknown key"):
            await known.identify(key)
    assert source.lookups == 1
    clock.now_s += 1.1
    with pytest.raises(Unauthorized):
        await known.identify(key)
    assert source.lookups == 2


async def test_revoked_and_expired_keys(source: FakeKeys, known: Keys) -> None:
    revoked = source.add(revoked=True)
    expired = source.add(expires_at=NOW)
    lasting = source.add(expires_at=NOW + timedelta(seconds=1))
    with pytest.raises(Unauthorized, match="revoked"):
        await known.identify(f"Bearer {revoked.secret}")
    with pytest.raises(Unauthorized, match="expired"):
        await known.identify(f"Bearer {expired.secret}")
    await known.identify(f"Bearer {lasting.secret}")


async def test_known_keys_outlive_an_outage_for_thirty_seconds_and_no_longer(
    source: FakeKeys, known: Keys, clock: Clock
) -> None:
    key = f"Bearer {source.add().secret}"
    await known.identify(key)
    source.away = True
    clock.now_s += 29
    await known.identify(key)
    clock.now_s += 2
    with pytest.raises(Unavailable, match="model registry"):
        await known.identify(key)
    source.away = False
    clock.now_s += 1
    await known.identify(key)


async def test_a_key_never_seen_is_not_refused_as_unknown_during_an_outage(source: FakeKeys, known: Keys) -> None:
    key = source.add()
    source.away = True
    with pytest.raises(Unavailable):
        await known.identify(f"Bearer {key.secret}")


async def test_an_outage_is_probed_by_one_call_in_a_while(source: FakeKeys, known: Keys, clock: Clock) -> None:
    key = f"Bearer {source.add().secret}"
    source.away = True
    for _ in range(10):
        with pytest.raises(Unavailable):
            await known.identify(key)
    assert source.lookups == 1


async def test_many_calls_at_once_share_one_lookup(source: FakeKeys, known: Keys) -> None:
    key = f"Bearer {source.add().secret}"
    await asyncio.gather(*(known.identify(key) for _ in range(50)))
    assert source.lookups == 1


async def test_memory_is_bounded_and_made_up_keys_push_out_no_real_one(
    source: FakeKeys, known: Keys, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_KNOWN", 3)
    monkeypatch.setattr(module, "_MAX_UNKNOWN", 2)
    real = [f"Bearer {source.add().secret}" for _ in range(3)]
    for key in real:
        await known.identify(key)
    for _ in range(10):
        with pytest.raises(Unauthorized):
            await known.identify(stranger())
    assert len(known._unknown) == 2
    source.away = True  # and so the grace in an outage is still theirs
    clock.now_s += 29
    for key in real:
        await known.identify(key)
    source.away = False
    clock.now_s += 1
    await known.identify(f"Bearer {source.add().secret}")
    assert len(known._known) == 3


class SlowKeys(FakeKeys):
    """A source with four connections, each busy for as long as `hold` is clear when the id is not known; it gives up
    on a connection that does not come free, as the real one does."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = asyncio.Semaphore(4)
        self.hold = asyncio.Event()
        self.busy = self.most_busy = 0

    async def find(self, key_id: str) -> KeyRecord | None:
        try:
            await asyncio.wait_for(self.pool.acquire(), 0.2)
        except asyncio.TimeoutError:
            raise KeySourceAway("no free connection") from None
        try:
            if key_id not in self.records:
                self.busy += 1
                self.most_busy = max(self.busy, self.most_busy)
                await self.hold.wait()
                self.busy -= 1
            return await super().find(key_id)
        finally:
            self.pool.release()


async def test_five_thousand_made_up_keys_do_not_hold_up_a_known_caller(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SlowKeys()
    known = Keys(source, environment="test", clock=clock, now=lambda: NOW)
    key = f"Bearer {source.add().secret}"
    await known.identify(key)
    strangers = [asyncio.ensure_future(known.identify(stranger())) for _ in range(5000)]
    refusals: set[str] = set()
    await asyncio.sleep(0)  # each has asked now
    assert len(known._lookups) == module._STRANGERS_AT_ONCE + module._STRANGERS_WAITING
    await eventually(lambda: sum(s.done() for s in strangers) >= 4900, what="most strangers refused at once")
    for s in strangers:
        if s.done():
            error = s.exception()
            assert isinstance(error, Unavailable)
            assert error.headers["Retry-After"] == "1"
            refusals.add(error.code)
    assert refusals == {"keys_busy"}
    lookups = source.lookups
    for _ in range(5):  # all the while a known key is even looked up again
        clock.now_s += module.FRESH_S + 0.1
        await known.identify(key)
    assert source.lookups == lookups + 5
    source.hold.set()
    await asyncio.wait(strangers)
    assert source.most_busy <= module._STRANGERS_AT_ONCE
    assert all(isinstance(s.exception(), (Unauthorized, Unavailable)) for s in strangers)
    assert not known._lookups
    with pytest.raises(Unauthorized):  # and strangers are answered again
        await known.identify(stranger())


async def test_made_up_keys_that_find_no_answer_do_not_stop_the_look_up_of_known_ones(
    source: FakeKeys, known: Keys, clock: Clock
) -> None:
    key = f"Bearer {source.add().secret}"
    await known.identify(key)
    source.away = True
    with pytest.raises(Unavailable):
        await known.identify(stranger())
    source.away = False
    lookups = source.lookups
    clock.now_s += module.FRESH_S + 0.1
    await known.identify(key)
    assert source.lookups == lookups + 1


async def test_a_burst_of_new_keys_after_a_start_is_served(known: Keys, source: FakeKeys) -> None:
    keys = [f"Bearer {source.add().secret}" for _ in range(60)]
    assert len({c.key_id for c in await asyncio.gather(*(known.identify(k) for k in keys))}) == 60


async def test_a_caller_that_waits_too_long_for_its_first_look_up_is_told(
    source: FakeKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STRANGER_WAITS_S", 0.02)
    slow = SlowKeys()
    known = Keys(slow, environment="test")
    first = [asyncio.ensure_future(known.identify(stranger())) for _ in range(module._STRANGERS_AT_ONCE)]
    await eventually(lambda: slow.busy == len(first))
    with pytest.raises(Unavailable) as refused:
        await known.identify(stranger())
    assert refused.value.code == "keys_busy"
    slow.hold.set()
    await asyncio.wait(first)
    for call in first:
        assert isinstance(call.exception(), Unauthorized)


def stranger() -> str:
    """A key that anyone could have made up: right shape, right checksum."""
    return f"Bearer {mint('test').secret}"


# -- what the feed says -----------------------------------------------------------------------------------------------


async def test_while_the_feed_is_current_a_key_is_looked_up_once(source: FakeKeys, known: Keys, clock: Clock) -> None:
    key = f"Bearer {source.add().secret}"
    first = await known.identify(key)
    for _ in range(100):
        clock.now_s += 30
        known.current(as_of_s=clock.now_s - 0.5)
        assert await known.identify(key) is first
    assert source.lookups == 1


async def test_a_changed_key_and_every_key_of_a_changed_customer_are_looked_up_before_they_count_again(
    source: FakeKeys, known: Keys, clock: Clock
) -> None:
    one, other = source.add(), source.add()
    for minted in (one, other):
        await known.identify(f"Bearer {minted.secret}")
    known.current(as_of_s=clock.now_s)
    source.records[one.key_id] = replace(source.records[one.key_id], revoked=True)
    known.changed([one.key_id, "somebody-elses"], [])
    with pytest.raises(Unauthorized, match="revoked"):
        await known.identify(f"Bearer {one.secret}")
    await known.identify(f"Bearer {other.secret}")
    assert source.lookups == 3
    wider = replace(source.records[other.key_id].customer, terms=Terms(rates=(base_rate(requests_per_s=1, burst=9),)))
    source.records[other.key_id] = replace(source.records[other.key_id], customer=wider)
    known.changed([], ["cust_b"])
    assert (await known.identify(f"Bearer {other.secret}")).limits[1].burst == 5
    known.changed([], ["cust_a", "cust_b"])
    assert (await known.identify(f"Bearer {other.secret}")).limits[1].burst == 9


async def test_a_changed_key_counts_for_nothing_while_it_cannot_be_looked_up(
    source: FakeKeys, known: Keys, clock: Clock
) -> None:
    key, untouched = source.add(), source.add()
    for minted in (key, untouched):
        await known.identify(f"Bearer {minted.secret}")
    source.away = True
    known.changed([key.key_id], [])
    known.current(as_of_s=clock.now_s)
    with pytest.raises(Unavailable):
        await known.identify(f"Bearer {key.secret}")
    await known.identify(f"Bearer {untouched.secret}")


class HeldKeys(FakeKeys):
    """A source whose answer was right when it was asked, and may be on its way for long."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = asyncio.Event()

    async def find(self, key_id: str) -> KeyRecord | None:
        found = await super().find(key_id)
        await self.hold.wait()
        return found


@pytest.mark.parametrize("told", ["key", "customer", "all"])
async def test_an_answer_from_before_a_change_that_arrives_after_it_was_told_does_not_count(
    clock: Clock, told: str
) -> None:
    source = HeldKeys()
    known = Keys(source, environment="test", clock=clock, now=lambda: NOW)
    key = source.add()
    call = asyncio.ensure_future(known.identify(f"Bearer {key.secret}"))
    await eventually(lambda: source.lookups == 1)
    await asyncio.sleep(0)  # it has its answer now
    source.records[key.key_id] = replace(source.records[key.key_id], revoked=True)
    if told == "all":
        known.all_changed()
    else:
        known.changed(*(([key.key_id], []) if told == "key" else ([], ["cust_a"])))
    known.current(as_of_s=clock.now_s)
    source.hold.set()
    with pytest.raises(Unauthorized, match="revoked"):
        await call
    assert not known._changed_meanwhile


async def test_a_key_that_is_made_right_after_it_was_tried_works_at_once(source: FakeKeys, known: Keys) -> None:
    key = source.add()
    record = source.records.pop(key.key_id)
    with pytest.raises(Unauthorized):
        await known.identify(f"Bearer {key.secret}")
    source.records[key.key_id] = record
    known.changed([key.key_id], [])
    await known.identify(f"Bearer {key.secret}")


async def test_another_server_makes_every_key_looked_up_again_and_strangers_of_none(
    source: FakeKeys, known: Keys, clock: Clock
) -> None:
    keys = [f"Bearer {source.add().secret}" for _ in range(50)]
    for key in keys:
        await known.identify(key)
    known.all_changed()
    known.current(as_of_s=clock.now_s)
    await asyncio.gather(*(known.identify(key) for key in keys))
    assert source.lookups == 100
    await asyncio.gather(*(known.identify(key) for key in keys))
    assert source.lookups == 100


async def test_callers_are_made_for_some_keys_and_known_are_all(
    source: FakeKeys, known: Keys, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_CALLERS", 2)
    keys = [f"Bearer {source.add().secret}" for _ in range(5)]
    made = [await known.identify(key) for key in keys]
    assert len(known._callers) == 2
    assert [await known.identify(key) for key in keys] == made
    assert await known.identify(keys[-1]) is await known.identify(keys[-1])
    assert source.lookups == 5


async def test_which_customers_changed_is_remembered_for_a_bounded_number_of_them(
    source: FakeKeys, known: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_CHANGED", 3)
    key = f"Bearer {source.add().secret}"
    await known.identify(key)
    for number in range(3):
        known.changed([], [f"cust_{number}"])
        await known.identify(key)
    assert source.lookups == 1
    known.changed([], ["cust_3"])  # one too many: from here on they are told apart anew
    assert len(known._customers) == 0
    for _ in range(2):
        await known.identify(key)
    assert source.lookups == 2
