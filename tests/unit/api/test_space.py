from __future__ import annotations

import random
from contextlib import ExitStack, suppress

import pytest

from api.admission.space import Space
from api.errors import Unavailable


def take(space: Space, customer: str, size_bytes: int = 0) -> ExitStack:
    held = ExitStack()
    held.enter_context(space.place(customer, size_bytes))
    return held


def refusal(space: Space, customer: str, size_bytes: int = 0) -> Unavailable:
    with pytest.raises(Unavailable) as refused, space.place(customer, size_bytes):
        pass
    assert refused.value.status == 503
    assert "Retry-After" in refused.value.headers
    return refused.value


def test_one_customer_has_a_quarter_of_the_places_and_others_have_the_rest() -> None:
    space = Space(max_in_flight=8)
    mine = [take(space, "a"), take(space, "a")]
    assert refusal(space, "a").code == "customer_crowded"
    others = [take(space, f"c{n}") for n in range(6)]
    full = refusal(space, "z")
    assert (full.code, full.message) == ("overloaded", "this gateway already waits for 8 requests")
    others[0].close()
    assert refusal(space, "a").code == "customer_crowded"
    mine[0].close()
    take(space, "a")


def test_bytes_of_inputs_are_bounded_for_each_and_for_all() -> None:
    space = Space(max_in_flight=100, max_per_customer=100, max_bytes=1000)
    first = take(space, "a", 500)
    refused = refusal(space, "a", 1)
    assert refused.code == "customer_crowded"
    assert "500 bytes" in refused.message
    _held = [take(space, "a", 0), take(space, "b", 400)]
    full = refusal(space, "c", 101)
    assert (full.code, "900 bytes" in full.message) == ("overloaded", True)
    first.close()
    take(space, "c", 101)


def test_a_customer_may_have_more_than_its_share_if_it_is_told_so() -> None:
    space = Space(max_in_flight=4, max_per_customer=4)
    _held = [take(space, "a") for _ in range(4)]
    assert refusal(space, "a").code == "customer_crowded"


def test_even_one_place_is_for_somebody() -> None:
    take(Space(max_in_flight=1), "a").close()


def test_however_calls_come_and_go_everything_is_given_back() -> None:
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")  # noqa: T201
    space = Space(max_in_flight=20, max_per_customer=7, max_bytes=1000)
    held: list[ExitStack] = []
    for _ in range(5000):
        if held and chance.random() < 0.5:
            held.pop(chance.randrange(len(held))).close()
        else:
            with suppress(Unavailable):
                held.append(take(space, chance.choice("abcdef"), chance.randrange(200)))
        assert space.in_flight == len(held) <= 20
        assert space.size_bytes <= 1000
        assert all(t.places <= 7 and t.size_bytes <= 500 for t in space._customers.values())
    for one in held:
        one.close()
    assert (space.in_flight, space.size_bytes, space._customers) == (0, 0, {})
