from __future__ import annotations

import asyncio

import asyncpg
import pytest

from infra.postgres import is_data_error, is_outage, on_connection, open_connection, split_queries
from infra.settings import PostgresSettings


def with_sqlstate(sqlstate: str) -> asyncpg.PostgresError:
    return asyncpg.PostgresError.new({"C": sqlstate, "M": "message"})


@pytest.mark.parametrize("sqlstate", ["08006", "57P01", "57P03", "53300", "40P01", "40001", "55P03"])
def test_trouble_of_the_server_is_an_outage(sqlstate: str) -> None:
    assert is_outage(with_sqlstate(sqlstate))
    assert not is_data_error(with_sqlstate(sqlstate))


@pytest.mark.parametrize("sqlstate", ["22003", "22P02", "23505", "23514", "54000"])
def test_trouble_of_a_value_is_a_data_error(sqlstate: str) -> None:
    assert is_data_error(with_sqlstate(sqlstate))
    assert not is_outage(with_sqlstate(sqlstate))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        asyncio.TimeoutError(),
        asyncpg.InterfaceError("closed"),
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
    ],
)
def test_a_lost_connection_is_an_outage(error: Exception) -> None:
    assert is_outage(error)


def test_anything_else_is_neither() -> None:
    for error in (with_sqlstate("42601"), KeyError("bug")):
        assert not is_outage(error)
        assert not is_data_error(error)


def test_statements_are_found_by_name_and_names_do_not_repeat() -> None:
    assert split_queries("-- name: a\nSELECT 1;\n\n-- name: b\nSELECT 2;") == {"a": "SELECT 1;", "b": "SELECT 2;"}
    with pytest.raises(ValueError, match="'a' is defined twice"):
        split_queries("-- name: a\nSELECT 1\n-- name: a\nSELECT 2")


class Server:
    """What stands for asyncpg's connection: it closes with that error, if any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[str] = []
        monkeypatch.setattr(asyncpg, "connect", self._connect)

    async def _connect(self, _dsn: str, **_options: float) -> Server:
        return self

    async def close(self, *, timeout: float) -> None:
        self.calls.append(f"close within {timeout:g} s")
        if self.error is not None:
            raise self.error

    def terminate(self) -> None:
        self.calls.append("terminate")


SETTINGS = PostgresSettings(dsn="postgresql://x")


async def _answer(_connection: object) -> str:
    return "an answer"


@pytest.mark.parametrize("error", [asyncio.TimeoutError(), ConnectionResetError(), with_sqlstate("57P01")])
def test_a_server_that_goes_away_at_the_end_takes_nothing_back(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    server = Server(monkeypatch, error)
    assert on_connection(SETTINGS, _answer) == "an answer"
    assert server.calls == ["close within 5 s", "terminate"]


def test_a_connection_is_closed_whatever_the_work_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_connection: object) -> None:
        raise KeyError("the work's own")

    for error in (None, ConnectionResetError()):
        server = Server(monkeypatch, error)
        with pytest.raises(KeyError, match="the work's own"):
            on_connection(SETTINGS, fail)
        assert server.calls[0] == "close within 5 s"


async def test_a_bug_in_closing_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    Server(monkeypatch, with_sqlstate("42601"))
    with pytest.raises(asyncpg.PostgresError):
        async with open_connection(SETTINGS):
            pass
