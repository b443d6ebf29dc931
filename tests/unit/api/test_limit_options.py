from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.operators.limit_options import LimitsChange, limit_place, rate_limit, shown
from api.operators.rates import NoSuchLimit, changed
from schemas.facts import RateLimit


def test_what_a_limit_says() -> None:
    assert rate_limit("items=1000/1m") == RateLimit(unit="items", amount=1000, window_s=60, burst=1000)
    assert rate_limit("tokens=5/h,burst=2,model=a.b-c") == RateLimit(
        unit="tokens", model="a.b-c", amount=5, window_s=3600, burst=2
    )
    assert rate_limit("requests=1/31d,model=m").window_s == 31 * 86400
    assert (limit_place("items"), limit_place("items,model=m")) == (("items", None), ("items", "m"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected UNIT=AMOUNT/WINDOW"),
        ("calls=1/1s", "a unit of requests, items, tokens"),
        ("items=1", "expected UNIT=AMOUNT/WINDOW"),
        ("items=1/s,burst", "expected UNIT=AMOUNT/WINDOW"),
        ("items=1.5/1s", "expected UNIT=AMOUNT/WINDOW"),
        ("items=1/0s", "a window of 1s to 31d"),
        ("items=1/32d", "a window of 1s to 31d"),
        ("items=0/1s", "an amount from 1"),
        ("items=1000001/1s", "a million per second"),
        ("items=1/1s,burst=0", "a burst from 1"),
        ("items=1/1s,burst=99999999999999", "a burst from 1"),
        ("items=1/31d,burst=1000", "within three years"),
        ("items=1/1s,burst=1,burst=2", "stands there twice"),
        ("items=1/1s,size=1", "nobody knows 'size'"),
        ("items=1/1s,model=", "the name of a model"),
        ("items=1/1s,model={x}", "the name of a model"),
        ("items=\u0661/1s", "expected UNIT=AMOUNT/WINDOW"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rate_limit(text)


@pytest.mark.parametrize("text", ["", "calls", "items,", "items,model=", "items,burst=1", "items,model=m,model=n"])
def test_what_names_no_limit(text: str) -> None:
    with pytest.raises(ValueError, match="expected UNIT"):
        limit_place(text)


@given(
    unit=st.sampled_from(["requests", "items", "tokens"]),
    model=st.sampled_from([None, "m", "a.b_c-d"]),
    window_s=st.integers(1, 31 * 86400),
    share=st.floats(0, 1),
    burst=st.integers(1, 37),
)
def test_a_limit_is_shown_as_it_is_said(unit: str, model: str | None, window_s: int, share: float, burst: int) -> None:
    amount = max(1, int(window_s * 1_000_000 * share))
    limit = RateLimit(unit=unit, model=model, amount=amount, window_s=window_s, burst=burst)
    assert rate_limit(shown([limit])) == limit


def test_a_change_puts_and_drops_and_leaves_the_rest() -> None:
    items, of_model = rate_limit("items=1/1s"), rate_limit("items=2/1s,model=m")
    tokens = rate_limit("tokens=3/1s")
    assert changed([tokens, of_model, items], put=[rate_limit("items=9/1s")], drop=[("tokens", None)]) == (
        rate_limit("items=9/1s"),
        of_model,
    )
    with pytest.raises(NoSuchLimit, match="no limit of tokens of model m"):
        changed([tokens], put=[], drop=[("tokens", "m")])
    assert LimitsChange(drop=(("items", None),)) != LimitsChange()
