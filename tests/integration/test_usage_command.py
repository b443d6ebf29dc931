"""`inferlog usage`: rows in an order a person can read, and names that nobody has."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner, Result

from infra.postgres import connect
from infra.settings import PostgresSettings
from streams.commands import usage


@pytest.fixture
def filled(env: dict[str, str]) -> dict[str, str]:
    """Three customers of whom one used nothing, use by one that was never registered, and a model never used."""

    async def fill() -> None:
        connection = await connect(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"]))
        try:
            await connection.execute(
                """
                INSERT INTO customers (customer_id, name, requests_per_s, burst)
                VALUES ('cust_1', 'zeta', 1, 1), ('cust_2', 'acme', 1, 1), ('cust_3', 'idle', 1, 1);
                INSERT INTO models (model, task) VALUES ('fresh', 'TENSORS');
                INSERT INTO usage_hourly (customer_id, hour, model, version, price_id, meter, quantity)
                SELECT customer_id, '2026-03-01T12:00Z', 'digits', repeat('a', 64), 'standard-v1', 'items', 5
                FROM unnest(ARRAY['cust_1', 'cust_2', 'cust_0']) AS used (customer_id)
                """
            )
        finally:
            await connection.close()

    asyncio.run(fill())
    return env


def call(env: dict[str, str], *arguments: str) -> Result:
    return CliRunner().invoke(usage, arguments, env=env)


def test_rows_of_an_hour_are_in_the_order_of_the_names_shown(filled: dict[str, str]) -> None:
    lines = json.loads(call(filled, "--json").output)["lines"]
    assert [line["customer"] for line in lines] == ["", "acme", "zeta"]


@pytest.mark.parametrize("as_what", [(), ("--json",), ("--csv",)])
@pytest.mark.parametrize("kind", ["customer", "model"])
def test_a_name_that_nobody_has_is_a_mistake(filled: dict[str, str], kind: str, as_what: tuple[str, ...]) -> None:
    result = call(filled, f"--{kind}", "nobody", *as_what)
    assert result.exit_code == 1
    assert result.output == f"Error: there is no {kind} 'nobody'; see  inferlog {kind}s list\n"


@pytest.mark.parametrize(
    "wanted",
    [
        ("--customer", "idle"),
        ("--customer", "cust_3"),
        ("--customer", "cust_0", "--from", "2026-03-02"),
        ("--model", "fresh"),
        ("--model", "digits", "--from", "2026-03-02"),
    ],
)
def test_a_name_that_used_nothing_is_none(filled: dict[str, str], wanted: tuple[str, ...]) -> None:
    result = call(filled, *wanted)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("no usage\n")
