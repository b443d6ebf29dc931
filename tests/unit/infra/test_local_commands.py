from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from infra.local import commands
from infra.local.stack import PartStatus, Stack, StackError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERLOG_HOME", str(tmp_path))
    return tmp_path


def part(name: str, *, why: str = "") -> PartStatus:
    return PartStatus(name=name, address="127.0.0.1:1", pid=7, healthy=not why, why=why, log=Path("logs") / name)


def knows(monkeypatch: pytest.MonkeyPatch, *parts: PartStatus) -> None:
    monkeypatch.setattr(Stack, "status", lambda self: list(parts))


@pytest.mark.parametrize("command", [commands.up, commands.down, commands.status])
def test_help_shows_an_example(command: object) -> None:
    shown = CliRunner().invoke(command, ["--help"]).output  # type: ignore[arg-type]
    assert "Example:  inferlog" in shown


def test_status_is_0_only_when_all_are_healthy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knows(monkeypatch, part("kafka"), part("s3"))
    assert CliRunner().invoke(commands.status).exit_code == 0
    knows(monkeypatch, part("kafka"), part("s3", why="refuses connections"))
    shown = CliRunner().invoke(commands.status)
    assert shown.exit_code == 1
    assert "refuses connections" in shown.output


def test_status_as_json(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knows(monkeypatch, part("kafka", why="not started"))
    (found,) = json.loads(CliRunner().invoke(commands.status, ["--json"]).output)
    assert found == {
        "name": "kafka",
        "address": "127.0.0.1:1",
        "pid": 7,
        "healthy": False,
        "why": "not started",
        "log": "logs/kafka",
    }


def test_status_where_nothing_was_started_says_what_to_do(home: Path) -> None:
    shown = CliRunner().invoke(commands.status)
    assert shown.exit_code == 1
    assert f"nothing was ever started at {home}; `inferlog up` starts it" in shown.output


def test_a_failed_up_names_the_part_and_gives_advice(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Stack, **options: object) -> dict[str, str]:
        raise StackError({"kafka": "its process ended\n--- last lines of kafka.log\nno memory"})

    monkeypatch.setattr(Stack, "up", fail)
    shown = CliRunner().invoke(commands.up)
    assert shown.exit_code == 1
    assert "kafka: its process ended\n--- last lines of kafka.log\nno memory" in shown.output
    assert "`inferlog up` tries again" in shown.output
