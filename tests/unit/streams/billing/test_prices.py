"""What a price list entry may say."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from streams.billing.prices import Price, by_id, price, shown


def test_an_entry_is_read_from_words_and_said_in_words() -> None:
    entry = price("standard-v2", ["requests=0", "items=100"], "usd")
    assert entry == Price(price_id="standard-v2", currency="usd", amounts_micros={"items": 100, "requests": 0})
    assert shown(entry) == "items=100, requests=0 (millionths of USD)"
    assert price("p", [f"items={2**63 - 1}"], "usd").amounts_micros["items"] == 2**63 - 1


@pytest.mark.parametrize(
    ("price_id", "meters", "currency", "words"),
    [
        ("a b", ["items=1"], "usd", "PRICE_ID: expected"),
        ("p", ["items=1"], "USD", "--currency: expected three small letters"),
        ("p", [], "usd", "--meter: expected at least one"),
        ("p", ["items"], "usd", "like items=100, found 'items'"),
        ("p", ["items=-1"], "usd", "like items=100"),
        ("p", ["items=0.5"], "usd", "like items=100"),
        ("p", ["items=١"], "usd", "like items=100"),
        ("p", ["Items=1"], "usd", "nothing is counted as 'Items'"),
        ("p", ["itmes=1"], "usd", "nothing is counted as 'itmes'; the meters are requests, items, tokens"),
        ("p", ["items=1", "items=1"], "usd", "'items' is priced twice"),
        ("p", [f"items={2**63}"], "usd", "at most 9223372036854775807"),
    ],
)
def test_mistakes_are_named(price_id: str, meters: list[str], currency: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        price(price_id, meters, currency)


def test_rows_of_one_meter_each_become_entries() -> None:
    at = datetime(2026, 3, 1, tzinfo=timezone.utc)

    def row(price_id: str, meter: str, amount: int, currency: str = "usd") -> dict[str, Any]:
        return {
            "price_id": price_id,
            "meter": meter,
            "amount_micros": amount,
            "currency": currency,
            "created_at": at,
        }

    found = by_id([row("a", "items", 1), row("a", "tokens", 2), row("b", "items", 3)])
    assert found == [price("a", ["items=1", "tokens=2"], "usd"), price("b", ["items=3"], "usd")]
    assert found[0].created_at == at
    with pytest.raises(ValueError, match="eur and usd"):
        by_id([row("a", "items", 1), row("a", "tokens", 2, "eur")])
