from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from infra import commands
from infra.provision import Provisioned
from infra.schema_publish import SchemaConflict, UnknownHere
from infra.topic_plan import Drift, Growth
from schemas.topics import all_topics

GROWN = Growth(topic="inference.requests.default.v1", found=8, partitions=12)
DRIFT = Drift(
    topic="inference.usage.v1", setting="retention.ms", declared="2", found="1", why="because", remedy="do this"
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the command over a provisioner that comes to the given end."""

    def with_end(end: Provisioned | Exception, *options: str) -> Any:
        async def work(*_args: Any, **_options: Any) -> Provisioned:
            if isinstance(end, Exception):
                raise end
            return end

        monkeypatch.setattr(commands.provisioning, "provision", work)
        monkeypatch.setattr(commands.provisioning, "examine", work)
        for name, value in (("KAFKA_BOOTSTRAP", "b:1"), ("POSTGRES_DSN", "postgresql://x"), ("REDIS_URL", "redis://x")):
            monkeypatch.setenv(f"INFERLOG_{name}", value)
        for name in ("ACCESS_KEY", "SECRET_KEY", "ENDPOINT"):
            monkeypatch.setenv(f"INFERLOG_S3_{name}", "x")
        return CliRunner().invoke(commands.provision, list(options))

    return with_end


def test_a_check_says_what_would_be_done_and_exits_3(run: Callable[..., Any]) -> None:
    found = run(Provisioned(topics=["a.v1"], grown=[GROWN], schemas=[14, 15], migrations=["0009_x.sql"]), "--check")
    assert found.exit_code == 3
    assert found.output.splitlines()[:4] == [
        "would create topic a.v1",
        "would put schemas on the log: ids 14, 15",
        "would apply migration 0009_x.sql",
        "would grow inference.requests.default.v1 from 8 to 12 partitions",
    ]
    done = run(Provisioned(), "--check")
    assert (done.exit_code, done.output) == (0, "nothing is missing\n")


def test_a_schema_that_only_the_log_has_is_a_note_and_no_drift(run: Callable[..., Any]) -> None:
    newer = Provisioned(unknown_schemas=[UnknownHere(schema_id=16, subject="inference.usage.v1-value", version=2)])
    for options in ((), ("--check",)):
        done = run(newer, *options)
        assert done.exit_code == 0
        assert "note: the log has schema id 16 (inference.usage.v1-value version 2)" in done.output
    assert json.loads(run(newer, "--json").output)["unknown_schemas"][0]["schema_id"] == 16


@pytest.mark.parametrize("pool", ["", "GPU A", "a.b", "a" * 41])
def test_a_name_that_no_pool_may_have_is_refused(run: Callable[..., Any], pool: str) -> None:
    for done in (
        run(Provisioned(), "--pool", pool, "--check"),
        CliRunner().invoke(commands.topics, ["list", "--pool", pool]),
    ):
        assert done.exit_code == 2
        assert "'--pool': expected the name of a pool: 1 to 40 of a-z, 0-9 and '-'" in " ".join(done.output.split())


def test_what_was_done_is_no_failure_and_drift_is(run: Callable[..., Any]) -> None:
    done = run(Provisioned(topics=["a.v1"], grown=[GROWN]))
    assert done.exit_code == 0
    assert "once it is restarted" in done.output
    drifting = run(Provisioned(drift=[DRIFT]))
    assert drifting.exit_code == 3
    assert drifting.output.splitlines() == [
        "drift: inference.usage.v1 retention.ms: declared 2, found 1",
        "  left alone: because",
        "  to mend it: do this",
    ]
    as_json = run(Provisioned(drift=[DRIFT]), "--json")
    assert (as_json.exit_code, json.loads(as_json.output)["drift"][0]["remedy"]) == (3, "do this")


def test_a_conflict_is_one_line(run: Callable[..., Any]) -> None:
    refused = run(SchemaConflict("schema id 15 is A here and B there"))
    assert (refused.exit_code, refused.output) == (1, "Error: schema id 15 is A here and B there\n")


def test_topics_are_listed_with_their_reasons() -> None:
    listed = CliRunner().invoke(commands.topics, ["list", "--pool", "gpu-a"]).output
    rows = json.loads(CliRunner().invoke(commands.topics, ["list", "--pool", "gpu-a", "--json"]).output)
    assert [row["name"] for row in rows] == [t.name for t in all_topics(("gpu-a",))]
    assert all(row["why"] in listed for row in rows)
    assert "8 partitions or more, kept 40 days" in listed
    assert "1 partition, kept for ever, the newest per key" in listed
