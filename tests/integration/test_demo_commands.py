"""The demo's commands at a terminal: what they print, what they refuse, how they end on Ctrl-C. No server runs."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from docs.demo import digits, minilm, shell
from docs.demo.checks import Check
from infra.local.stack import Stack

# By name: as an attribute of its package, `__main__` may be anything.
demo: Any = import_module("docs.demo.__main__")


@pytest.mark.parametrize("command", [digits.main, minilm.main, demo.main])
def test_help_shows_an_example_and_writes_nothing(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0
    assert "Example:  python -m docs.demo" in shown.output
    assert list(tmp_path.iterdir()) == []


def test_digits_says_what_it_wrote_and_how_good_it_is(tmp_path: Path) -> None:
    first = CliRunner().invoke(digits.main, [str(tmp_path / "digits")])
    assert first.exit_code == 0, first.output
    assert first.output.startswith(f"wrote {tmp_path / 'digits'}, held-out accuracy 9")
    assert first.output.count("\n") == 1
    again = CliRunner().invoke(digits.main, [str(tmp_path / "digits")])
    assert again.output.startswith("there already: ")


def test_digits_prints_a_sample_and_nothing_else(tmp_path: Path) -> None:
    body = json.loads(CliRunner().invoke(digits.main, ["--sample"]).output)
    assert body["inputs"][0]["shape"] == [1, 64]


@pytest.mark.parametrize("arguments", [[], ["out", "--sample"]])
def test_digits_wants_a_folder_or_a_sample(arguments: list[str]) -> None:
    result = CliRunner().invoke(digits.main, arguments)
    assert result.exit_code == 2
    assert "expected a folder OUT, or --sample" in result.output


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A stack that is down, whose start does nothing; holds "down" once it was stopped."""
    calls: list[str] = []
    monkeypatch.setenv("INFERLOG_HOME", str(tmp_path))
    monkeypatch.setattr(Stack, "status", lambda self: [])
    monkeypatch.setattr(Stack, "up", lambda self, progress: {"INFERLOG_API_PORT": "1"})
    monkeypatch.setattr(Stack, "down", lambda self: calls.append("down"))
    return calls


def test_ctrl_c_stops_what_the_demo_started_and_is_one_sentence(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(url: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    result = CliRunner().invoke(demo.main)
    assert result.exit_code == 130
    assert result.output.endswith("\ninterrupted; nothing is lost, run it again\n")
    assert "Aborted" not in result.output
    assert stopped == ["down"]


def test_ctrl_c_does_not_reach_the_commands_of_the_demo_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def run(command: list[str], **options: Any) -> Any:
        started.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(shell.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        shell.inferlog("verify")
    assert started[0]["start_new_session"] is True


@pytest.mark.parametrize("disagree", [(), ("acme",)])
def test_the_ticks_are_numbered_like_the_summary_and_only_a_green_run_has_a_next_step(
    stopped: list[str], monkeypatch: pytest.MonkeyPatch, disagree: tuple[str, ...]
) -> None:
    checks = [
        Check(claim="one", columns=("x",), rows=[("1",)]),
        Check(claim="two", columns=("x",), rows=[], disagree=disagree),
    ]

    def run(url: str) -> tuple[list[Check], dict[tuple[str, str], int]]:
        demo._show(checks)
        return checks, {("acme", "items"): 3}

    monkeypatch.setattr(demo, "run", run)
    result = CliRunner().invoke(demo.main, ["--json"])
    assert result.exit_code == (1 if disagree else 0)
    assert "✓ 1 of 2: one" in result.output
    assert f"{'✗' if disagree else '✓'} 2 of 2: two" in result.output
    assert f"{2 - len(disagree)} of 2 claims hold" in result.output
    assert ("Try it by hand" in result.output) is (not disagree)
    assert json.loads(result.output.splitlines()[-1]) == {
        "claims": 2,
        "failed": ["two"] if disagree else [],
        "accepted": {"items": 3},
    }
