"""No failure ends the work beside the ledger, or the ledger; each is said once, and the next round comes sooner."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta

import pytest

from infra.kafka import BusUnavailable
from infra.settings import KafkaSettings, PostgresSettings
from streams.ledger.pruner import Pruner
from streams.quarantine.collector import Collector
from streams.rounds import LONGEST_PAUSE_S, Rounds

FIRST_ROUND_S, ROUND_S = 7.0, 600.0


class Ended(BaseException):
    """What ends an endless run."""


class Failing(Rounds):
    """Each round raises the next of these errors, or does its work where there is none; then the run ends."""

    def __init__(self, errors: Iterator[Exception | None]) -> None:
        self._errors = errors
        self.pauses: list[float] = []

        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)

        super().__init__("the work", first_round_s=FIRST_ROUND_S, round_s=ROUND_S, sleep=sleep)

    async def round(self) -> None:
        try:
            error = next(self._errors)
        except StopIteration:
            raise Ended from None
        if error is not None:
            raise error
        self._enter("idle")


@pytest.mark.parametrize("outage", [ConnectionRefusedError("no one listens"), BusUnavailable("no one listens")])
async def test_it_goes_on_after_any_failure(caplog: pytest.LogCaptureFixture, outage: Exception) -> None:
    caplog.set_level(logging.WARNING)
    work = Failing(iter([None, *[outage] * 10, ZeroDivisionError("a bug"), None]))
    with pytest.raises(Ended):
        await work.run()
    assert work.pauses[:2] == [FIRST_ROUND_S, ROUND_S]
    assert work.pauses[2:5] == [1.0, 2.0, 4.0]
    assert max(work.pauses[2:12]) == LONGEST_PAUSE_S
    assert work.pauses[-1] == ROUND_S
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2, "an outage is said once, a bug each time"
    assert "the work waits" in said[0]
    assert "no one listens" in said[0]
    assert caplog.records[1].exc_info is not None
    assert (work.state, work.why) == ("idle", None)


async def test_an_outage_is_visible() -> None:
    work = Failing(iter([ConnectionRefusedError("no one listens")]))
    with pytest.raises(Ended):
        await work.run()
    assert work.state == "away"
    assert "no one listens" in str(work.why)


def test_what_is_told_of_each_is_what_the_pages_show() -> None:
    postgres = PostgresSettings(dsn="postgresql://nobody@127.0.0.1:1/none")
    pruner = Pruner(postgres, group="g", topic="t", partitions=8, horizon=timedelta(days=40))
    collector = Collector(KafkaSettings(bootstrap="127.0.0.1:1", namespace=""), postgres)
    for work in (pruner, collector):
        work._enter("away", "no one listens")
        assert work.figures().items() >= {"state": "away", "why": "no one listens"}.items()
