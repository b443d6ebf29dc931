"""What a row older than the outbox says as a fact: what was true when the outbox came, and the same every time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from schemas.facts import KeyChange, KeyChanged, PriceBookPublished
from schemas.topics import KEYS, PRICES
from streams.outbox.old_rows import of_key, of_price
from tests.factories import NOON


def key(**other: Any) -> dict[str, Any]:
    return {
        "at": NOON,
        "id": "k1/CREATED",
        "change": "CREATED",
        "key_id": "k1",
        "customer_id": "cus",
        "label": "",
        "requests_per_s": 1,
        "burst": 1,
        "created_at": NOON,
        "last_created_at": NOON + timedelta(hours=3),  # it was rotated
        "last_expires_at": NOON + timedelta(hours=7),
        "revoked_at": None,
        **other,
    }


def test_a_key_is_told_as_it_was_when_the_outbox_came() -> None:
    topic, name, created = of_key(key())
    assert isinstance(created, KeyChanged)
    assert (topic, name, created.change, created.occurred_at) == (KEYS, "k1", KeyChange.CREATED, NOON)
    assert (created.expires_at, created.revoked_at) == (NOON + timedelta(hours=4), None)
    end = NOON + timedelta(hours=1)
    _, _, revoked = of_key(key(at=end, id="k1/REVOKED", change="REVOKED", revoked_at=end))
    assert isinstance(revoked, KeyChanged)
    assert (revoked.change, revoked.occurred_at, revoked.revoked_at) == (KeyChange.REVOKED, end, end)
    assert revoked.expires_at == created.expires_at
    assert revoked.event_id != created.event_id == of_key(key())[2].event_id, "the same row has the same fact"
    _, _, endless = of_key(key(last_expires_at=None))
    assert isinstance(endless, KeyChanged) and endless.expires_at is None


def test_keys_that_replace_each_other_in_a_circle_have_no_fact() -> None:
    with pytest.raises(ValueError, match="in a circle"):
        of_key(key(last_created_at=None, last_expires_at=None))


def test_a_price_is_told_with_all_its_meters() -> None:
    row = {"at": NOON, "id": '["p", "usd"]', "price_id": "p", "currency": "usd", "amounts_micros": '{"items": 3}'}
    topic, name, told = of_price(row)
    assert isinstance(told, PriceBookPublished)
    assert (topic, name, told.amounts_micros, told.occurred_at) == (PRICES, "p", {"items": 3}, NOON)
