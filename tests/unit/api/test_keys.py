from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest

from api.admission import keys as module
from api.admission.keys import Keys, bearer, digest, key_id_of, mint
from api.errors import Unauthorized, Unavailable
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


async def test_a_known_key_is_looked_up_once_in_five_seconds(source: FakeKeys, known: Keys, clock: Clock) -> None:
    key = source.add()
    for _ in range(3):
        assert (await known.identify(f"Bearer {key.secret}")).key_id == key.key_id
    assert source.lookups == 1
    clock.now_s += 5.1
    await known.identify(f"Bearer {key.secret}")
    assert source.lookups == 2


async def test_a_wrong_secret_with_a_right_checksum_is_unknown(source: FakeKeys, known: Keys) -> None:
    key, other = source.add(), mint("test")
    start = key.secret[: len("il_test_") + 13] + other.secret[len("il_test_") + 13 : -8]
    forged = start + module._checksum(start)
    assert key_id_of(forged, "test") == key.key_id
    with pytest.raises(Unauthorized, match="unknown key"):
        await known.identify(f"Bearer {forged}")


async def test_unknown_keys_are_remembered_for_a_second(source: FakeKeys, known: Keys, clock: Clock) -> None:
    stranger = f"Bearer {mint('test').secret}"
    for _ in range(3):
        with pytest.raises(Unauthorized, match="unknown key"):
            await known.identify(stranger)
    assert source.lookups == 1
    clock.now_s += 1.1
    with pytest.raises(Unauthorized):
        await known.identify(stranger)
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


async def test_memory_is_bounded(source: FakeKeys, known: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ENTRIES", 3)
    for _ in range(10):
        with pytest.raises(Unauthorized):
            await known.identify(f"Bearer {mint('test').secret}")
    assert len(known._entries) == 3
