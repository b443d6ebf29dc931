"""`inferlog export` on real topics: its files say the same to every tool, and the analysts' page works as written."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import fastavro
import pytest
from click.testing import CliRunner, Result

from infra.kafka import open_producer
from infra.postgres import connect
from infra.settings import replay_settings
from schemas.codec import Codec, encode
from schemas.facts import RouteChanged
from schemas.lockfile import locked_schemas
from schemas.records import InferenceFinished, UsageRecorded
from schemas.topics import RESULTS, ROUTES, USAGE, Topic
from streams.replay.export_command import export_topic
from tests.factories import NOON, finished, requested, usage
from tests.processes import ROOT

#: customer, hour (microseconds since 1970), meter
Key = tuple[str, int, str]
Sums = dict[Key, int]
FORMATS = ("parquet", "jsonl", "csv", "avro")
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def blocks(language: str, *, naming: str = "", section: str = "Files") -> list[str]:
    """The code blocks of a section, as they stand on the page."""
    page = (ROOT / "docs" / "analysts.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [b for b in re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL) if naming in b]


def write(env: dict[str, str], topic: Topic, values: Sequence[tuple[bytes, int]]) -> None:
    """Put these values on these partitions."""

    async def send() -> None:
        kafka = replay_settings(env).kafka
        async with open_producer(kafka) as producer:
            name = topic.in_namespace(kafka.namespace).name
            futures = [await producer.enqueue(name, v, partition=p, timeout_s=30) for v, p in values]
            await producer.acknowledged(futures, timeout_s=30)

    asyncio.run(send())


async def add_customer(env: dict[str, str], customer_id: str, name: str) -> None:
    connection = await connect(replay_settings(env).postgres)
    try:
        await connection.execute(
            "INSERT INTO customers (customer_id, name, requests_per_s, burst) VALUES ($1, $2, 1, 1)", customer_id, name
        )
    finally:
        await connection.close()


def export(env: dict[str, str], *arguments: object) -> Result:
    return CliRunner().invoke(export_topic, [str(a) for a in arguments], env=env)


def some_usage(count: int, *, seed: int) -> list[UsageRecorded]:
    """Usage of six customers over three hours; quantities that a double cannot hold, and meters that not all have."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        quantities = {"requests": 1, "items": chance.randrange(1, 100)}
        if chance.random() < 0.5:
            quantities["tokens"] = chance.choice([chance.randrange(9000), 2**53 + chance.randrange(9000)])
        at = NOON + timedelta(microseconds=chance.randrange(3 * 3600 * 10**6))
        made.append(usage(customer_id=f"{chance.randrange(6):03}", occurred_at=at, quantities=quantities))
    return made


def sums_of(records: Sequence[UsageRecorded]) -> Sums:
    sums: Sums = {}
    for r in {r.request_id: r for r in records}.values():
        hour = r.occurred_at.replace(minute=0, second=0, microsecond=0)
        for meter, quantity in r.quantities.items():
            key = (r.customer_id, microseconds(hour), meter)
            sums[key] = sums.get(key, 0) + quantity
    return sums


def microseconds(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def by_duckdb(block: str) -> Sums:
    """What a block of SQL finds; its last statement is the query."""
    connection = duckdb.connect()
    *before, query = (s for s in block.split(";") if s.strip())
    for statement in before:
        connection.execute(statement)
    found = connection.execute(f"SELECT customer_id, epoch_us(hour), meter, quantity FROM ({query})")
    return {(customer, hour, meter): int(quantity) for customer, hour, meter, quantity in found.fetchall()}


def by_pandas(page: dict[str, Any], path: str) -> Sums:
    found = page["sums"](page["read"](path))
    return {(customer, microseconds(hour), meter): int(n) for (customer, hour, meter), n in found.items()}


def by_polars(page: dict[str, Any], path: str) -> Sums:
    return {(c, microseconds(hour), meter): n for c, hour, meter, n in page["sums"](page["read"](path)).iter_rows()}


def by_fastavro(path: str) -> Sums:
    with Path(path).open("rb") as file:
        return sums_of([UsageRecorded(**{k: v for k, v in r.items() if k[0] != "_"}) for r in fastavro.reader(file)])


def test_every_tool_finds_the_same_sums_in_every_format_as_the_page_says(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = some_usage(500, seed=6)
    write(env, USAGE, [(encode(r), int(r.customer_id)) for r in [*once, *once[:60], *once[100:140]]])
    clean = {k: v for k, v in os.environ.items() if not k.startswith("INFERLOG_")}
    typed = "\n".join(line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines())
    done = subprocess.run(
        ["bash", "-euc", typed],
        cwd=tmp_path,
        env={**clean, **env, "PATH": f"{Path(sys.executable).parent}:{clean['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    hour = NOON + timedelta(hours=1)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 3
    assert all(f"{hour:%Y-%m-%dT%H:}" in line["occurred_at"] for line in lines)
    monkeypatch.chdir(tmp_path)
    expected = sums_of(once)
    for path in ("usage.parquet", "usage.jsonl", "usage.csv"):
        (query,) = blocks("sql", naming=path)
        assert by_duckdb(query) == expected, path
    for tool, read in (("pandas", by_pandas), ("polars", by_polars)):
        (code,) = blocks("python", naming=f"import {tool} ")
        page: dict[str, Any] = {}
        exec(code, page)
        for path in ("usage.parquet", "usage.jsonl", "usage.csv"):
            assert read(page, path) == expected, (tool, path)
    assert by_fastavro("usage.avro") == expected
    (code,) = blocks("python", naming="import fastavro")
    page = {}
    exec(code, page)
    assert len(page["first_of"]) == len(once)


def test_what_was_true_at_a_moment_is_read_off_the_changes_as_the_page_says(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = datetime(2026, 3, 1, 14, 3, tzinfo=timezone.utc)
    before, at = moment - timedelta(microseconds=1), moment
    changes = [("digits", "a", NOON), ("minilm", "b", NOON), ("digits", "c", before), ("digits", "d", at)]
    facts = [
        RouteChanged(
            event_id=uuid4(), occurred_at=when, model=model, version=version * 64, pool="default", spread=2,
            price_id="standard-v1", actor="ada", reason=None,
        )
        for model, version, when in changes
    ]  # fmt: skip
    write(env, ROUTES, [(encode(f), 0) for f in facts])
    monkeypatch.chdir(tmp_path)
    (typed,), (query,) = (blocks(language, section="What was true at 14:03") for language in ("console", "sql"))
    done = export(env, *typed.removeprefix("$ inferlog export ").split())
    assert done.exit_code == 0, done.stderr
    found = duckdb.connect().execute(f"SELECT model, version FROM ({query.strip().rstrip(';')}) ORDER BY model")
    assert found.fetchall() == [("digits", "c" * 64), ("minilm", "b" * 64)]


@pytest.fixture
def results(env: dict[str, str]) -> tuple[dict[str, str], list[InferenceFinished]]:
    """Ten results, half written by a writer of version 1, and on partition 3 four records that are none."""
    old = Codec(locked_schemas(), pinned={InferenceFinished.SCHEMA: 1})
    requests = [requested(customer_id=f"cus_{n % 2}", occurred_at=NOON + timedelta(minutes=n)) for n in range(10)]
    made = [finished(r, occurred_at=r.occurred_at) for r in requests]
    values = [((old.encode if n % 2 else encode)(r), n % 3) for n, r in enumerate(made)]
    unknown = b"\x00\x00\x00\x27\x0f" + encode(made[0])[5:]
    broken = [b"no record", unknown, encode(made[0]) + b"!", encode(usage())]
    write(env, RESULTS, [*values, *((value, 3) for value in broken)])
    asyncio.run(add_customer(env, "cus_1", "acme"))
    return env, made


def test_what_does_not_decode_is_named_and_no_file_is_written(
    results: tuple[dict[str, str], list[InferenceFinished]], tmp_path: Path
) -> None:
    env, made = results
    path = tmp_path / "results.jsonl"
    failed = export(env, "results", "--output", path, "--json")
    assert failed.exit_code == 1
    said = json.loads(failed.stdout)
    assert (said["written"], said["records"], said["undecodable"]["count"]) == (False, 10, 4)
    assert [(p["partition"], p["offset"]) for p in said["undecodable"]["first"]] == [(3, n) for n in range(4)]
    assert "schema id 9999 is unknown here" in failed.stderr
    assert "--skip-undecodable" in failed.stderr
    assert not list(tmp_path.glob("*results*"))
    done = export(env, "results", "--output", path, "--json", "--skip-undecodable")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["undecodable"]["count"] == 4
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["request_id"] for line in lines} == {str(r.request_id) for r in made}
    # Both versions have the fields of the newest.
    assert {tuple(output) for line in lines for output in line["outputs"]} == {
        ("name", "datatype", "shape", "data", "blob")
    }


def test_what_is_selected_is_what_is_written(results: tuple[dict[str, str], list[InferenceFinished]]) -> None:
    env, made = results

    def ids(*options: object) -> set[str]:
        done = export(env, "results", "--format", "jsonl", "--skip-undecodable", *options)
        assert done.exit_code == 0, done.stderr
        return {json.loads(line)["request_id"] for line in done.stdout.splitlines()}

    def expected(*numbers: int) -> set[str]:
        return {str(made[n].request_id) for n in numbers}

    assert ids("--partition", 1) == expected(1, 4, 7)
    assert ids("--customer", "cus_1") == ids("--customer", "acme") == expected(1, 3, 5, 7, 9)
    assert ids("--since", NOON + timedelta(minutes=4)) == expected(4, 5, 6, 7, 8, 9)
    assert ids("--until", NOON + timedelta(minutes=4)) == expected(0, 1, 2, 3)
    assert len(ids("--limit", 2)) == 2
    # The four that are none were written today and name no time of their own.
    assert export(env, "results", "--format", "csv", "--until", NOON + timedelta(days=1)).exit_code == 0
    assert export(env, "results", "--format", "csv", "--partition", 2).exit_code == 0
    for options, words in (
        (("results", "--partition", 8), "has partitions 0 to 7"),
        (("models", "--customer", "cus_1"), "ModelPublished has no customer_id"),
        (("results", "--customer", "nobody"), "there is no customer 'nobody'; names and ids are those of"),
        (("requests.nobody",), "requests.nobody.v1 does not exist"),
    ):
        refused = export(env, *options, "--format", "jsonl")
        assert refused.exit_code == 1
        assert words in refused.stderr
