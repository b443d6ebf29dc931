"""What the operator's commands refuse before they ask any server, and how they say amounts and limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from api.operators.customers_commands import money
from api.operators.limit_options import rate_limit, shown
from infra.cli import cli
from schemas.facts import SpendCap

RATES = ("--requests-per-s", "1", "--burst", "1")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings of servers that are not there, whatever this checkout has run."""
    addresses = {
        "HOME": str(tmp_path),
        "KAFKA_BOOTSTRAP": "127.0.0.1:9",
        "POSTGRES_DSN": "postgresql://nobody@127.0.0.1:9/none",
        "REDIS_URL": "redis://127.0.0.1:9/0",
        "S3_ENDPOINT": "http://127.0.0.1:9",
        "S3_ACCESS_KEY": "x",
        "S3_SECRET_KEY": "x",
        "ACTOR": "a test",
    }
    for name, value in addresses.items():
        monkeypatch.setenv(f"INFERLOG_{name}", value)


def said(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, arguments)
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("name", [" acme", "acme ", " ", "\u00a0acme", "cust_4k7q0m2x9abc", "cust_"])
def test_a_name_that_would_be_taken_for_another_is_refused(name: str) -> None:
    status, words = said("customers", "create", name, *RATES)
    assert status == 2
    assert "no blanks at its edges, and not the form of an id (cust_…)" in words
    assert "Postgres does not answer" in said("customers", "create", "acme cust_1 ltd", *RATES)[1]


@pytest.mark.parametrize("command", [("customers", "limits", "acme"), ("keys", "limits", "4k7q0m2x9abc")])
def test_a_limit_that_is_given_and_taken_away_at_once_is_refused(command: tuple[str, ...]) -> None:
    status, words = said(*command, "--limit", "items=1/1s", "--without", "items")
    assert status == 2
    assert "--limit and --without: expected one of them for items, found both" in words
    assert "Postgres does not answer" in said(*command, "--limit", "items=1/1s", "--without", "tokens")[1]


def test_the_limits_of_a_unit_and_of_one_model_are_two() -> None:
    limits = ("customers", "limits", "acme", "--limit", "items=1/1s,model=m")
    assert "for items,model=m, found both" in said(*limits, "--without", "items,model=m")[1]
    assert "Postgres does not answer" in said(*limits, "--without", "items")[1]


@pytest.mark.parametrize(
    "command",
    [
        ("keys", "expire", "4k7q0m2x9abc", "--in"),
        ("keys", "create", "acme", "--expires-in"),
        ("keys", "rotate", "4k7q0m2x9abc", "--overlap"),
        ("models", "route", "digits", "--in"),
    ],
)
def test_no_time_at_all_is_no_length_of_time(command: tuple[str, ...]) -> None:
    status, words = said(*command, "0s")
    assert status == 2
    assert "expected a number above 0" in words


def test_a_key_has_one_end() -> None:
    status, words = said("keys", "create", "acme", "--expires-in", "1d", "--expires-at", "2199-01-01")
    assert status == 2
    assert "at most one of --expires-in and --expires-at" in words


def test_a_customer_is_either_pinned_or_not_and_to_one_version() -> None:
    pin = ("models", "route", "digits", "--pin", "acme=77c0de")
    assert "--pin and --unpin: expected one of them for customer 'acme'" in said(*pin, "--unpin", "acme")[1]
    assert said(*pin, "--pin", "acme=3fa1b2")[0] == 2
    assert "Postgres does not answer" in said(*pin, "--unpin", "brook")[1]


@pytest.mark.parametrize(
    ("micros", "words"),
    [(1, "0.000001 usd"), (500, "0.0005 usd"), (0, "0.00 usd"), (250_500_000, "250.50 usd"), (12_345, "0.012345 usd")],
)
def test_a_cap_is_shown_with_all_its_digits(micros: int, words: str) -> None:
    assert money(SpendCap(amount_micros=micros, currency="usd")) == words


@pytest.mark.parametrize(
    ("given", "words"),
    [("1/1h", "1/1h"), ("1/1d", "1/1d"), ("1/31d", "1/31d"), ("1/60s", "1/1m"), ("1/90s", "1/90s"), ("1/s", "1/1s")],
)
def test_a_window_is_shown_in_its_largest_whole_unit(given: str, words: str) -> None:
    assert shown([rate_limit(f"items={given}")]) == f"items={words},burst=1"


def test_help_says_what_a_left_out_rate_and_a_publication_mean() -> None:
    words = said("keys", "create", "--help")[1]
    assert "copied from the customer's now; the key keeps it when the customer's is changed" in words
    assert "go to this version at once unless --no-route is given" in said("models", "publish", "--help")[1]
