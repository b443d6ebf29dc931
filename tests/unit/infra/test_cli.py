from __future__ import annotations

import asyncio

import asyncpg
import click
import pytest

from infra import cli as module
from infra.kafka import BusUnavailable
from infra.redis import RedisError
from infra.s3 import StoreUnavailable
from infra.settings import SettingsError


def ends_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        raise error

    monkeypatch.setattr(module, "cli", click.Command("inferlog", callback=work))
    module.main([])


def of_class(sqlstate: str) -> asyncpg.PostgresError:
    return asyncpg.PostgresError.new({"C": sqlstate, "M": "what the server says"})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SettingsError("INFERLOG_API_PORT is not set"), "INFERLOG_API_PORT is not set"),
        (BusUnavailable("127.0.0.1:9: refused"), "Kafka does not answer: 127.0.0.1:9"),
        (RedisError("refused"), "Redis does not answer: refused"),
        (StoreUnavailable("bucket inferlog"), "S3 does not answer: bucket inferlog"),
        (
            ConnectionRefusedError(111, "Connect call failed"),
            "a server does not answer: [Errno 111] Connect call failed",
        ),
        (asyncio.TimeoutError(), "does not answer in time"),
        (PermissionError(13, "Permission denied", "/x"), "Permission denied: '/x'"),
        (of_class("57P03"), "Postgres does not answer: what the server says"),
        (asyncpg.InterfaceError("closed"), "Postgres does not answer: closed"),
        (of_class("28P01"), "Postgres refuses: what the server says"),
        (of_class("3D000"), "inferlog provision"),
        (of_class("42P01"), "inferlog provision"),
    ],
)
def test_an_expected_failure_is_one_line_and_status_1(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        ends_with(error, monkeypatch)
    said = capsys.readouterr().err
    assert end.value.code == 1
    assert words in said
    assert said.startswith("Error: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("bug", [KeyError("x"), RuntimeError("x"), of_class("42601"), of_class("23505")])
def test_a_bug_keeps_its_traceback(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(bug)):
        ends_with(bug, monkeypatch)
