"""Nobody waits for a server that is known to be away, and it is noticed when it is back."""

from __future__ import annotations

import pytest

from infra.breaker import Breaker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_after_a_failure_calls_are_refused_and_one_per_pause_finds_out() -> None:
    clock = Clock()
    breaker = Breaker("the server", pause_s=2.0, clock=clock)
    assert breaker.refuses() is None
    breaker.failed("refused the connection")
    assert breaker.refuses() == "refused the connection"
    clock.now_s += 2
    assert breaker.refuses() is None, "this call finds out"
    assert breaker.refuses() is not None, "the others do not wait for it"
    clock.now_s += 1.5
    assert breaker.trouble() == "the server did not answer 4 s ago: refused the connection"
    breaker.succeeded()
    assert (breaker.refuses(), breaker.trouble()) == (None, None)


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    breaker = Breaker("the server", pause_s=0.0)
    for _ in range(3):
        breaker.failed("away")
    breaker.succeeded()
    breaker.succeeded()
    assert [r.getMessage() for r in caplog.records] == ["the server is away", "the server answers again"]
