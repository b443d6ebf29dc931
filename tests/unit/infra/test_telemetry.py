from __future__ import annotations

import logging

from infra.telemetry import Repetitions
from tests.fakes import Clock


def line(name: str, text: str, *args: object, level: int = logging.ERROR) -> logging.LogRecord:
    return logging.LogRecord(name, level, __file__, 1, text, args, None)


def test_a_client_that_repeats_itself_is_heard_every_few_seconds_with_a_count() -> None:
    clock = Clock()
    repetitions = Repetitions(clock=clock)
    passed = []
    for _ in range(600):  # a minute of an outage
        record = line("aiokafka", "Unable connect to node with id %s: %s", 1, "refused")
        if repetitions.filter(record):
            passed.append(getattr(record, "fields", {}).get("left_out", 0))
        clock.now_s += 0.1
    assert passed[0] == 0
    assert 10 <= len(passed) <= 13
    assert sum(passed) + len(passed) >= 550


def test_nothing_is_hidden_the_first_time_it_is_said() -> None:
    repetitions = Repetitions(clock=Clock())
    assert repetitions.filter(line("aiokafka", "Unable connect to node with id %s", 1))
    assert not repetitions.filter(line("aiokafka", "Unable connect to node with id %s", 1))
    assert repetitions.filter(line("aiokafka", "Unable connect to node with id %s", 2))
    assert repetitions.filter(line("aiokafka.consumer.fetcher", "Unable connect to node with id %s", 1))
    assert repetitions.filter(line("aiokafka", "Unable connect to node with id %s", 1, level=logging.WARNING))


def test_our_own_lines_always_pass() -> None:
    repetitions = Repetitions(clock=Clock())
    assert all(repetitions.filter(line("api.middleware", "a call failed")) for _ in range(10))


def test_memory_is_bounded() -> None:
    repetitions = Repetitions(clock=Clock())
    assert all(repetitions.filter(line("aiokafka", "offset %s", n)) for n in range(5000))
    assert len(repetitions._said) <= 1000
