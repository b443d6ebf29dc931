from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from api.errors import AnswerLost
from api.once import last_word as module
from api.once.last_word import LogsLastWord
from api.results.log import Log
from api.results.readers import AT_ONCE, Readers
from infra.kafka_lookups import Lookups
from schemas.codec import encode
from schemas.records import InferenceFinished, Outcome
from tests.conditions import eventually
from tests.factories import finished
from tests.fake_log import FakeLog

TOPIC = "results"
SINCE, UNTIL = finished().admitted_at, finished().admitted_at + timedelta(seconds=70)


def at(log: FakeLog, result: InferenceFinished, *, after_s: float) -> None:
    """A result on the log, so long after its request was admitted."""
    time_ms = round((SINCE.timestamp() + after_s) * 1000)
    log.add(TOPIC, result.request_id.bytes, encode(result), time_ms=time_ms)


async def asked(log: FakeLog, of: InferenceFinished, **changes: Any) -> InferenceFinished | None:
    word = LogsLastWord(Readers(Lookups(log.open, most=1)), topic=TOPIC)
    customer_id = changes.get("customer_id", of.customer_id)
    return await word.of(of.request_id, customer_id, since=SINCE, until=UNTIL)


async def test_the_first_result_of_the_request_is_its_end() -> None:
    log, result = FakeLog(), finished()
    at(log, finished(), after_s=0)
    at(log, result, after_s=1)
    at(log, finished(request_id=result.request_id, outcome=Outcome.EXPIRED), after_s=11)
    assert await asked(log, result) == result


async def test_what_was_recorded_long_after_its_deadline_is_no_success_and_not_read() -> None:
    log, result = FakeLog(), finished()
    at(log, finished(), after_s=0)
    at(log, result, after_s=3600)
    assert await asked(log, result) is None
    assert await asked(log, finished()) is None


async def test_another_customers_request_has_no_end_here() -> None:
    log, result = FakeLog(), finished()
    at(log, result, after_s=1)
    assert await asked(log, result, customer_id="somebody else") is None


async def test_nothing_is_said_while_the_log_does_not_answer_or_cannot_be_read() -> None:
    log, result = FakeLog(), finished()
    log.add(
        TOPIC, result.request_id.bytes, b"\0\0\0\xff\xff of a newer worker", time_ms=round(SINCE.timestamp() * 1000)
    )
    with pytest.raises(AnswerLost, match="another schema"):
        await asked(log, result)
    log.away = True
    with pytest.raises(AnswerLost, match="switched off"):
        await asked(log, result)


async def test_one_customers_last_words_leave_a_reader_to_others_and_are_so_many_at_once() -> None:
    log, result = FakeLog(), finished()
    at(log, result, after_s=1)
    log.held.clear()
    readers = Readers(Lookups[Log](log.open, most=2))
    word = LogsLastWord(readers, topic=TOPIC)

    async def ask(customer_id: str) -> InferenceFinished | None:
        return await word.of(result.request_id, customer_id, since=SINCE, until=UNTIL)

    many = [asyncio.ensure_future(ask("somebody else")) for _ in range(AT_ONCE)]
    await eventually(lambda: log.opened == 1)
    with pytest.raises(AnswerLost, match=f"more than {AT_ONCE} look-ups of yours") as refused:
        await ask("somebody else")
    assert refused.value.code == "log_away"
    own = asyncio.ensure_future(ask(result.customer_id))
    await eventually(lambda: log.opened == 2)  # though three were there before
    log.held.set()
    assert await own == result
    assert await asyncio.gather(*many) == [None] * AT_ONCE


async def test_a_last_word_waits_no_longer_for_its_turn_than_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log, result = FakeLog(), finished()
    at(log, result, after_s=1)
    readers = Readers(Lookups[Log](log.open, most=1))
    word = LogsLastWord(readers, topic=TOPIC)
    monkeypatch.setattr(module, "_WITHIN_S", 0.01)
    async with readers.one("somebody else"):
        with pytest.raises(AnswerLost, match="TimeoutError"):
            await word.of(result.request_id, result.customer_id, since=SINCE, until=UNTIL)
    monkeypatch.setattr(module, "_WITHIN_S", 60.0)
    assert await word.of(result.request_id, result.customer_id, since=SINCE, until=UNTIL) == result
