"""`inferlog usage` on real tables: names, ranges, zones, odd rows, and answers that go to a file or a pipe."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from infra.postgres import connect
from infra.settings import PostgresSettings
from schemas.keys import ledger_group
from schemas.topics import USAGE
from streams.usage.commands import usage
from streams.usage.lines import COLUMNS
from tests.processes import ROOT

VERSION = "a" * 64
# Kolkata is 5:30 ahead: its 2 March begins within the UTC hour of 18:00.
ROWS = [
    ("cust_1", "2026-03-01T17:00Z", "digits", "items", 1),
    ("cust_1", "2026-03-01T18:00Z", "digits", "items", 10),
    ("cust_1", "2026-03-01T19:00Z", "digits", "items", 100),
    ("cust_2", "2026-03-01T12:00Z", "digits", "items", 5),
    ("cust_2", "2026-03-01T12:00Z", "digits", "requests", 2),
    ("cust_0", "2026-03-01T12:00Z", "digits", "items", 7),
]


@pytest.fixture
def filled(env: dict[str, str]) -> dict[str, str]:
    """Three customers of whom one used nothing, use by one that was never registered, and a model never used."""
    execute(
        env,
        """
        INSERT INTO customers (customer_id, name, requests_per_s, burst)
        VALUES ('cust_1', 'zeta', 1, 1), ('cust_2', 'acme', 1, 1), ('cust_3', 'idle', 1, 1);
        INSERT INTO models (model, task) VALUES ('fresh', 'TENSORS');
        """,
    )
    for who, hour, model, meter, quantity in ROWS:
        put(env, who, hour, model, meter, quantity)
    return env


def execute(env: dict[str, str], statement: str, *arguments: object) -> None:
    async def run() -> None:
        connection = await connect(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"]))
        try:
            await connection.execute(statement, *arguments)
        finally:
            await connection.close()

    asyncio.run(run())


def put(env: dict[str, str], who: str, hour: str, model: str, meter: str, quantity: int) -> None:
    statement = "INSERT INTO usage_hourly VALUES ($1, $2::text::timestamptz, $3, $4, 'standard-v1', $5, $6)"
    execute(env, statement, who, hour, model, VERSION, meter, quantity)


def call(env: dict[str, str], *arguments: str) -> Result:
    return CliRunner().invoke(usage, arguments, env=env)


def said(env: dict[str, str], *arguments: str) -> dict[str, object]:
    result = call(env, *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.output)
    return found


def test_rows_of_an_hour_are_in_the_order_of_the_names_shown(filled: dict[str, str]) -> None:
    lines = said(filled, "--to", "2026-03-01T13:00Z", "--meter", "items")["lines"]
    assert [(x["customer_id"], x["customer"], x["quantity"]) for x in lines] == [
        ("cust_0", "", 7),
        ("cust_2", "acme", 5),
    ]


def test_a_name_that_nobody_has_is_a_mistake_and_one_that_used_nothing_is_none(filled: dict[str, str]) -> None:
    for kind in ("customer", "model"):
        for form in ((), ("--json",), ("--csv",), ("--chart",)):
            result = call(filled, f"--{kind}", "nobody", *form)
            assert result.exit_code == 1
            assert result.output == f"Error: there is no {kind} 'nobody'; see  inferlog {kind}s list\n"
    result = call(filled, "--meter", "token")
    assert (result.exit_code, result.output) == (
        1,
        "Error: nothing was counted by the meter 'token'; there are items, requests\n",
    )
    for wanted in (
        ("--customer", "idle"),
        ("--meter", "items", "--customer", "idle"),
        ("--customer", "cust_3", "--chart"),
        ("--customer", "cust_0", "--from", "2026-03-02"),
        ("--model", "fresh"),
        ("--model", "digits", "--from", "2026-03-02"),
        ("--month", "2031-01", "--interval", "total"),
    ):
        result = call(filled, *wanted)
        assert result.exit_code == 0, result.output
        assert result.output.startswith("no usage\n")


def test_hours_belong_to_the_local_day_in_which_they_begin(filled: dict[str, str]) -> None:
    found = said(filled, "--zone", "Asia/Kolkata", "--interval", "day", "--customer", "zeta", "--by", "")
    assert found["lines"] == [
        # The hour of 18:00 UTC begins at 23:30 of the first.
        {"start": "2026-03-01T00:30:00+05:30", "end": "2026-03-02T00:30:00+05:30", "meter": "items", "quantity": 11},
        {"start": "2026-03-02T00:30:00+05:30", "end": "2026-03-03T00:30:00+05:30", "meter": "items", "quantity": 100},
    ]
    assert found["totals"] == {"items": 111}
    assert (found["zone"], found["interval"], found["by"]) == ("Asia/Kolkata", "day", ["meter"])
    assert "begins in it" in str(found["rule"])
    day = said(filled, "--zone", "Asia/Kolkata", "--day", "2026-03-01", "--customer", "zeta")
    assert day["totals"] == {"items": 11}
    # A range's edge inside a UTC hour leaves that hour to the day in which it begins.
    rest = said(filled, "--zone", "Asia/Kolkata", "--from", "2026-03-02", "--customer", "zeta")
    assert rest["totals"] == {"items": 100}


def test_every_zone_interval_and_grouping_has_the_same_totals_and_filters_narrow_them(filled: dict[str, str]) -> None:
    for zone in ("Asia/Kathmandu", "Australia/Lord_Howe"):
        for interval, by in zip(
            ("hour", "day", "month", "total"), ("", "customer", "customer,model,version,price_id", "meter"), strict=True
        ):
            found = said(filled, "--zone", zone, "--interval", interval, "--by", by)
            assert found["totals"] == {"items": 123, "requests": 2}
            assert sum(x["quantity"] for x in found["lines"]) == 125
    # Versions may be shortened, and no character of theirs means others.
    narrow = ("--version", "aaaa", "--price-id", "standard-v1", "--meter", "items", "--customer", "acme")
    assert said(filled, *narrow)["totals"] == {"items": 5}
    assert said(filled, "--version", "b")["totals"] == {}
    assert said(filled, "--version", "%")["totals"] == {}


ODD = [
    ("cust_2", "0001-01-01T00:00Z", "digits", "items", 1),
    ("cust_2", "-infinity", "digits", "items", 2),
    ("cust_2", "0044-03-15T12:00Z BC", "digits", "items", 3),
    ("cust_2", "infinity", "digits", "items", 4),
    ("cust_2", "9999-12-31T23:00Z", "digits", "items", 5),
    ("cust_2", "20000-12-31T23:00Z", "digits", "items", 6),
    ("cust_2", "2001-01-01T00:00Z", "digits", "items", 8),
    ("cust_2", "2998-12-31T23:00Z", "\x1b[2J\nbold", 'x,"y\r', 2**63 - 1),
    ("cust_0", "2998-12-31T23:00Z", "", 'x,"y\r', 2**63 - 1),
]


def test_odd_rows_are_counted_and_shown(filled: dict[str, str]) -> None:
    # Rows from before there was such a rule are still there.
    execute(filled, "ALTER TABLE usage_hourly DROP CONSTRAINT IF EXISTS usage_hourly_hour_is_finite")
    for row in ODD:
        put(filled, *row)
    for zone, interval in (
        ("UTC", "hour"),
        ("Pacific/Kiritimati", "day"),
        ("America/St_Johns", "month"),
        ("UTC", "total"),
    ):
        check_odd_rows(filled, "--interval", interval, "--zone", zone)


def check_odd_rows(filled: dict[str, str], *wanted: str) -> None:
    found = said(filled, *wanted)
    assert found["totals"] == {"items": 123 + 29, "requests": 2, 'x,"y\r': 2 * (2**63 - 1)}
    open_ended = {(x["start"] is None, x["end"] is None): x["quantity"] for x in found["lines"]}
    assert (open_ended[True, False], open_ended[False, True]) == (6, 15)
    table = call(filled, *wanted)
    assert table.exit_code == 0, table.output
    assert "\x1b" not in table.output
    assert "\\x1b[2J\\nbold" in table.output
    chart = call(filled, *wanted, "--chart")
    assert chart.exit_code == 0, chart.output
    rows = list(csv.DictReader(io.StringIO(call(filled, *wanted, "--csv").stdout_bytes.decode(), newline="")))
    assert sum(int(row["quantity"]) for row in rows) == sum(found["totals"].values())
    assert "\x1b[2J\nbold" in {row["model"] for row in rows}


def test_csv_is_rfc_4180_with_the_same_columns_whatever_is_asked(filled: dict[str, str], tmp_path: Path) -> None:
    head = b"start,end,customer_id,customer,model,version,price_id,meter,quantity\r\n"
    few = call(filled, "--csv", "--interval", "month", "--by", "").stdout_bytes
    assert few == head + (
        b"2026-03-01T00:00:00Z,2026-04-01T00:00:00Z,,,,,,items,123\r\n"
        b"2026-03-01T00:00:00Z,2026-04-01T00:00:00Z,,,,,,requests,2\r\n"
    )
    every = call(filled, "--csv", "--by", "customer,model,version,price_id").stdout_bytes
    assert every.startswith(head)
    target = tmp_path / "usage.csv"
    for options in ((), ("--overwrite",)):
        result = call(filled, "--csv", "--interval", "month", "--by", "", "--output", str(target), *options)
        assert (result.exit_code, result.output) == (0, "")
        assert target.read_bytes() == few
    refused = call(filled, "--csv", "--output", str(target))
    assert refused.exit_code == 1
    assert str(target) in refused.output
    assert target.read_bytes() == few


def test_a_name_may_be_in_any_script_and_the_terminal_in_none(filled: dict[str, str]) -> None:
    execute(filled, "UPDATE customers SET name = 'Ünïted 例え' WHERE customer_id = 'cust_2'")
    narrow = CliRunner(charset="ascii").invoke(usage, ["--customer", "cust_2"], env=filled)
    assert narrow.exit_code == 0, narrow.output
    assert "\\xdcn\\xefted" in narrow.output
    chart = CliRunner(charset="ascii").invoke(usage, ["--chart", "--by", "customer"], env=filled)
    assert chart.exit_code == 0, chart.output
    assert "###" in chart.output
    assert said(filled, "--customer", "Ünïted 例え")["totals"] == {"items": 5, "requests": 2}


def test_a_chart_has_a_bar_for_each_day_and_says_which_may_grow(filled: dict[str, str]) -> None:
    put(filled, "cust_1", "2026-03-04T12:00Z", "digits", "items", 246)
    topic, group = USAGE.in_namespace(filled["INFERLOG_NAMESPACE"]), ledger_group(filled["INFERLOG_NAMESPACE"])
    execute(
        filled,
        "INSERT INTO usage_watermarks SELECT $1, $2, p, '2026-03-04T00:00Z', now() - interval '3 h' "
        "FROM generate_series(0, $3 - 1) AS p",
        group, topic.name, topic.partitions,
    )  # fmt: skip
    result = call({**filled, "COLUMNS": "40"}, "--chart", "--ascii", "--meter", "items")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:5] == [
        "items, 369 in all",
        "2026-03-01  ############ 123",
        "2026-03-02   0",
        "2026-03-03   0",
        "2026-03-04* ######################## 246",
    ]
    assert max(map(len, lines[:5])) <= 40
    assert lines[5:7] == ["", "* may still grow"]
    assert lines[7] == "complete up to 2026-03-04T00:00:00Z, by the ledger's word of 3 h ago"
    assert "says nothing since" in lines[8]


def test_completeness_is_of_all_partitions_or_of_the_customers_own(filled: dict[str, str]) -> None:
    topic, group = USAGE.in_namespace(filled["INFERLOG_NAMESPACE"]), ledger_group(filled["INFERLOG_NAMESPACE"])
    add = "INSERT INTO usage_watermarks SELECT $1, $2, p, $4::text::timestamptz + p * interval '1 min', now() FROM "
    assert said(filled)["complete_until"] is None
    assert "unknown, no ledger has told it yet" in call(filled).output
    last = topic.partitions - 1
    execute(filled, add + "generate_series(1, $3) AS p", group, topic.name, last, "2026-03-01T12:00Z")
    assert said(filled)["complete_until"] is None
    own = said(filled, "--customer", "zeta")["complete_until"]
    execute(filled, add + "generate_series(0, $3) AS p", group, topic.name, 0, "2026-03-01T12:00Z")
    assert said(filled)["complete_until"] == "2026-03-01T12:00:00Z"
    own = own or said(filled, "--customer", "zeta")["complete_until"]
    assert str(own) >= "2026-03-01T12:00:00Z"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--zone", "Europe/Berln"), "near it are Europe/Berlin"),
        (("--zone", "../../etc/passwd"), "--zone"),
        (("--month", "2026-13"), "--month: expected a month, like 2026-01"),
        (("--day", "2026-02-30"), "--day: expected a day"),
        (("--from", "noon"), "--from: expected a date or an ISO 8601 time"),
        (("--to", "0001-01-01"), "--to: expected a date or an ISO 8601 time of the years 2000 to 2998"),
        (("--month", "2026-03", "--day", "2026-03-01"), "exclude each other"),
        (("--from", "2026-03-01T12:10Z", "--to", "2026-03-01T12:50Z"), "at least one full UTC hour"),
        (("--by", "day"), "day is an interval; write --interval day"),
        (("--by", "colour"), "expected names of customer, model, version, price_id"),
        (("--csv", "--chart"), "exclude each other"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(usage, arguments, env={"INFERLOG_HOME": "/nowhere"})
    assert result.exit_code == 2
    assert words in re.sub(r"\s+", " ", result.output.replace("'--", "--").replace("':", ":"))


def test_the_commands_on_the_page_work_as_written(filled: dict[str, str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ inferlog usage (.*)$", page, flags=re.MULTILINE)
    assert len(commands) > 5
    for command in commands:
        result = call(filled, *shlex.split(command.replace("usage.csv", str(tmp_path / "usage.csv"))))
        assert result.exit_code == 0, (command, result.output)
    assert (tmp_path / "usage.csv").read_text(encoding="utf-8").startswith("start,end,customer_id")
    (columns,) = re.findall(r"^`(start,end,customer_id[^`]*)`", page, flags=re.MULTILINE)
    assert columns.split(",") == list(COLUMNS)
