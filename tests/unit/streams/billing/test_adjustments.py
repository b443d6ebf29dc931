"""Which corrections of a bill are taken."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from streams.billing.adjustments import MOST_UNITS, refusal, whole_hour
from streams.billing.intents import HourKey

NOW = datetime(2026, 11, 29, 20, 30, tzinfo=timezone.utc)
LONG_AGO = datetime(2026, 10, 1, 10, tzinfo=timezone.utc)
THIS_HOUR = datetime(2026, 11, 29, 20, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    "text",
    ["2026-11-29T20", "2026-11-29T20:00", "2026-11-29T20:00:00Z", "2026-11-29T20:00+00:00", " 2026-11-29t20:00z"],
)
def test_an_hour_is_its_start_in_utc(text: str) -> None:
    assert whole_hour(text) == THIS_HOUR
    assert whole_hour(text).utcoffset() == THIS_HOUR.utcoffset()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2026-11-29", "found '2026-11-29'"),
        ("yesterday", "found 'yesterday'"),
        ("2026-11-29T20:30", "not a whole hour"),
        ("2026-11-29T20:00:00.000001", "not a whole hour"),
        ("2026-11-29T20:00+02:00", "not in UTC"),
        ("2026-11-29T20:30+00:30", "not in UTC"),
    ],
)
def test_any_other_time_is_refused_with_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        whole_hour(text)


def why_not(units: int, **changes: Any) -> str | None:
    key = HourKey(customer_id="c", meter=changes.pop("meter", "items"), hour=changes.pop("hour", THIS_HOUR))
    return refusal(
        key,
        units,
        billed_units=changes.pop("billed", 40),
        known_meters=["items", "tokens"],
        customer_since=changes.pop("since", NOW),
        carried=changes.pop("carried", False),
        now=NOW,
    )


def test_an_hour_can_be_taken_down_to_nothing_and_up_to_what_stripe_can_be_told() -> None:
    assert why_not(-40) is None
    assert why_not(MOST_UNITS - 40) is None
    assert why_not(-1, billed=MOST_UNITS + 2) is None, "usage alone brought it there"


def test_an_hour_too_old_for_stripe_is_corrected_by_who_says_that_they_carry_it() -> None:
    assert why_not(1, hour=LONG_AGO, since=LONG_AGO, carried=True) is None


@pytest.mark.parametrize(
    ("units", "changes", "words"),
    [
        (0, {}, "not 0"),
        (MOST_UNITS + 1, {}, "at most 15 digits"),
        (-MOST_UNITS - 1, {}, "at most 15 digits"),
        (MOST_UNITS - 39, {}, "at most 999999999999999"),
        (-41, {}, "-41 would bring them below 0"),
        (-1, {"billed": 0}, "below 0"),
        (1, {"meter": "item"}, "nobody knows 'item'; known are items, tokens"),
        (1, {"hour": datetime(2026, 11, 29, 21, tzinfo=timezone.utc)}, "2026-11-29T21:00Z has not begun"),
        (
            1,
            {"hour": datetime(2026, 11, 29, 19, tzinfo=timezone.utc)},
            "c was created at 2026-11-29T20:30Z, after 2026-11",
        ),
        (1, {"hour": LONG_AGO, "since": LONG_AGO}, "2026-10-01T10:00Z is more than 35 days ago"),
        (1, {"carried": True}, "--carried: the hour is not too old"),
    ],
)
def test_the_rest_is_refused_in_words(units: int, changes: dict[str, Any], words: str) -> None:
    assert words in str(why_not(units, **changes))
