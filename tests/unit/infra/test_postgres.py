from __future__ import annotations

import asyncio

import asyncpg
import pytest

from infra.postgres import is_data_error, is_outage, split_queries


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
