"""Whose name a change carries."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from infra import actor
from infra.actor import Author, author, authored


def test_what_is_said_comes_before_the_variable_and_that_before_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor.getpass, "getuser", lambda: "root")
    assert author("ada", "why", {"INFERLOG_ACTOR": "brook"}) == Author(actor="ada", reason="why")
    assert author(None, None, {"INFERLOG_ACTOR": "brook"}) == Author(actor="brook")
    assert author(None, None, {}) == Author(actor="root")


def test_an_account_without_a_name_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(actor.getpass, "getuser", nobody)
    assert author(None, None, {}).actor.startswith("uid ")


@pytest.mark.parametrize(
    ("name", "reason", "env", "at_fault"),
    [
        ("", None, {}, "--actor"),
        ("a\nb", None, {}, "--actor"),
        ("x" * 201, None, {}, "--actor"),
        ("\udcff", None, {}, "--actor"),
        (None, None, {"INFERLOG_ACTOR": " "}, "INFERLOG_ACTOR"),
        ("ada", "", {}, "--reason"),
        ("ada", "x" * 1001, {}, "--reason"),
    ],
)
def test_text_that_no_fact_can_carry_is_refused_by_name(
    name: str | None, reason: str | None, env: dict[str, str], at_fault: str
) -> None:
    with pytest.raises(ValueError, match=f"^{at_fault}: expected 1 to "):
        author(name, reason, env)


def test_a_command_is_called_with_its_author() -> None:
    @click.command()
    @authored(reason_required=True)
    @click.option("--n", type=int)
    def change(by: Author, n: int) -> None:
        click.echo(f"{by.actor} {by.reason} {n}")

    run = CliRunner().invoke
    assert run(change, ["--actor", "ada", "--reason", "why", "--n", "1"]).output == "ada why 1\n"
    assert "Missing option '--reason'" in run(change, ["--n", "1"]).output
    assert "--actor: expected" in run(change, ["--actor", " ", "--reason", "why"]).output
