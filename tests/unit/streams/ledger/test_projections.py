"""The digest of a usage record: equal for equal content, different for any other, and the same for ever."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import timedelta, timezone
from uuid import UUID

import pytest

from schemas.records import UsageRecorded
from streams.ledger.projections import DIGEST_BYTES, UnfitRecord, check_fit, content_digest
from tests.unit.streams.usage_samples import usage

R = usage(1)
OTHERS = {
    "event_id": UUID(int=7),
    "occurred_at": R.occurred_at + timedelta(microseconds=1),
    "request_id": UUID(int=8),
    "customer_id": "bolt",
    "model": "minilm",
    "version": "b" * 64,
    "price_id": "standard-v2",
    "quantities": {"requests": 1, "items": 5},
}


@pytest.mark.parametrize("name", [f.name for f in fields(UsageRecorded)])
def test_every_field_of_the_record_is_in_its_digest(name: str) -> None:
    assert content_digest(replace(R, **{name: OTHERS[name]})) != content_digest(R)


def test_what_is_equal_has_one_digest_however_it_is_written() -> None:
    elsewhere = R.occurred_at.astimezone(timezone(timedelta(hours=5)))
    same = replace(R, occurred_at=elsewhere, quantities=dict(reversed(R.quantities.items())))
    assert same == R
    assert content_digest(same) == content_digest(R)


def test_neighbouring_fields_do_not_run_into_each_other() -> None:
    assert content_digest(replace(R, customer_id="ab", model="c")) != content_digest(
        replace(R, customer_id="a", model="bc")
    )


def test_the_digest_never_changes_because_tables_hold_it() -> None:
    digest = content_digest(usage(1, customer="é\u2028\x00", minutes=3))
    assert len(digest) == DIGEST_BYTES
    assert digest.hex() == "874846d652842804407db3bf02977f37"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"customer_id": ""}, "customer_id: is empty"),
        ({"quantities": {}}, "quantities: is empty"),
        ({"quantities": {"": 1}}, "a meter has an empty name"),
        # The decoder refuses it before; whoever makes records by other means meets it here.
        ({"quantities": {"items": -1}}, "meter 'items' is -1"),
    ],
)
def test_what_would_bill_nobody_nothing_or_less_is_unfit(changes: dict[str, object], words: str) -> None:
    check_fit(R)
    with pytest.raises(UnfitRecord, match=words):
        check_fit(replace(R, **changes))
