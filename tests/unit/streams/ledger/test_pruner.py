"""No failure ends the pruner or the ledger beside it; each is said once, and the next round comes sooner."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta

import pytest

from infra.settings import PostgresSettings
from streams.ledger.pruner import FIRST_ROUND_S, ROUND_S, Pruner


class Ended(BaseException):
    """What ends an endless run."""


def failing(errors: Iterator[Exception | None], pauses: list[float]) -> Pruner:
    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    class Failing(Pruner):
        async def round(self) -> None:
            try:
                error = next(errors)
            except StopIteration:
                raise Ended from None
            if error is not None:
                raise error
            self.state = "idle"

    dsn = "postgresql://nobody@127.0.0.1:1/none"
    return Failing(
        PostgresSettings(dsn=dsn), group="g", topic="t", partitions=8, horizon=timedelta(days=40), sleep=sleep
    )


async def test_it_goes_on_after_any_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    pauses: list[float] = []
    outage = ConnectionRefusedError("no one listens")
    pruner = failing(iter([None, *[outage] * 10, ZeroDivisionError("a bug"), None]), pauses)
    with pytest.raises(Ended):
        await pruner.run()
    assert pauses[:2] == [FIRST_ROUND_S, ROUND_S]
    assert pauses[2:5] == [1.0, 2.0, 4.0]
    assert max(pauses[2:12]) == 60.0
    assert pauses[-1] == ROUND_S
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2, "an outage is said once, a bug each time"
    assert "no one listens" in said[0]
    assert caplog.records[1].exc_info is not None
    assert pruner.figures()["state"] == "idle"


async def test_an_outage_is_visible() -> None:
    pruner = failing(iter([ConnectionRefusedError("no one listens")]), [])
    with pytest.raises(Ended):
        await pruner.run()
    assert pruner.figures()["state"] == "away"
    assert "no one listens" in pruner.figures()["why"]
