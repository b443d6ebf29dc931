from __future__ import annotations

from datetime import datetime, timezone

import pytest

from api.access.key_record import CustomerRecord, KeyRecord, Terms, alike, base_rate, caller_of, rate, same_customer
from api.admission.caller import Cap, Concurrency
from api.errors import Forbidden


def record(**changes: object) -> KeyRecord:
    base = base_rate(requests_per_s=3, burst=4)
    fields = {
        "key_id": "k",
        "customer": CustomerRecord(customer_id="cust_a", terms=Terms(rates=(base,))),
        "terms": Terms(rates=(base,)),
        "secret_sha256": b"s" * 32,
    }
    return KeyRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_an_old_key_has_the_two_rates_it_always_had() -> None:
    caller = caller_of(record())
    assert [(b.name, b.interval_us, b.burst, b.unit, b.model) for b in caller.limits] == [
        ("key:k", 333_334, 4, "requests", None),
        ("customer:cust_a", 333_334, 4, "requests", None),
    ]
    assert (caller.concurrency, caller.cap, caller.models, caller.operations) == ((), None, frozenset(), frozenset())
    caller.require("usage")
    caller.require_model("any")


def test_every_bucket_has_a_name_of_its_own_the_keys_first() -> None:
    one = [base_rate(requests_per_s=1, burst=1)]
    every = one + [rate(amount=7, window_s=60, burst=2, unit=u) for u in ("items", "requests", "tokens")]
    models = [rate(amount=7, window_s=60, burst=2, unit=u, model="m") for u in ("items", "requests", "tokens")]
    caller = caller_of(
        record(
            terms=Terms(rates=tuple(every), max_concurrent=2, models=frozenset("m"), operations=frozenset({"infer"})),
            customer=CustomerRecord(
                customer_id="cust_a",
                terms=Terms(rates=(*every, *models), max_concurrent=9),
                cap=Cap(amount_micros=5, currency="eur"),
            ),
        )
    )
    own = ["key:k", "key:k:items", "key:k:requests", "key:k:tokens"]
    shared = ["customer:cust_a", "customer:cust_a:items", "customer:cust_a:requests", "customer:cust_a:tokens"]
    assert [b.name for b in caller.limits] == [*own, *shared, "model:m:items", "model:m", "model:m:tokens"]
    assert [b.model for b in caller.limits] == [None] * 8 + ["m"] * 3
    assert caller.concurrency == (Concurrency(name="key:k", most=2), Concurrency(name="customer:cust_a", most=9))
    assert caller.cap == Cap(amount_micros=5, currency="eur")
    with pytest.raises(Forbidden):
        caller.require("usage")
    with pytest.raises(Forbidden):
        caller.require_model("other")


@pytest.mark.parametrize(
    ("amount", "window_s", "interval_us"),
    [(7, 1, 142_858), (1_000_000, 1, 1), (999_999, 1, 2), (1, 86400, 86_400_000_000)],
)
def test_intervals_are_rounded_up(amount: int, window_s: int, interval_us: int) -> None:
    found = rate(amount=amount, window_s=window_s, burst=1, unit="items")
    assert found.interval_us == interval_us
    assert found.interval_us * amount >= window_s * 1_000_000


def test_what_many_keys_have_in_common_is_in_memory_once() -> None:
    made = [alike(Terms(rates=(base_rate(requests_per_s=2, burst=77),))) for _ in range(3)]
    assert made[0] is made[1] is made[2]
    customers = [same_customer(CustomerRecord(customer_id="cust_z", terms=made[0])) for _ in range(2)]
    assert customers[0] is customers[1]


def test_no_secret_shows() -> None:
    assert "secret" not in repr(record(expires_at=datetime(2026, 3, 1, tzinfo=timezone.utc)))
