"""What an option may hold; that no command is left out is tested over the tree of all of them (test_cli_values)."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import click
import pytest
from click.testing import CliRunner

from infra.arguments import LONGEST_TEXT, Seconds, guarded, iso_time, why_no_text
from streams.replay.evidence import CLOCK_MARGIN
from streams.replay.proofs import hour_start


@click.group()
def made() -> None: ...


@made.command()
@click.argument("name")
@click.option("--many", multiple=True)
@click.option("--pick", type=click.Choice(["a", "b"]))
@click.option("--count", type=click.IntRange(1, 8), help="How many.")
@click.option("--folder", type=click.Path(exists=True))
@click.option("--yes/--no", default=True)
def leaf(**values: Any) -> None:
    click.echo(repr(sorted((k, v) for k, v in values.items() if v)))


def call(*arguments: str) -> Any:
    return CliRunner().invoke(guarded(made), ["leaf", *arguments])


def test_what_can_be_carried_goes_through_and_help_is_as_it_was() -> None:
    done = call("naïve ŝtono 石 \u202e", "--many", "x", "--many", "y" * LONGEST_TEXT, "--pick", "a", "--count", "8")
    assert done.exit_code == 0, done.output
    assert "('count', 8)" in done.output
    assert "('many', ('x', 'yyy" in done.output
    assert "[a|b]" in call("--help").output
    assert "How many.  [1<=x<=8]" in call("--help").output


def test_the_command_itself_stays_as_it_was() -> None:
    held = guarded(made)
    assert CliRunner().invoke(held, ["leaf", "a\0"]).exit_code == 2
    assert CliRunner().invoke(made, ["leaf", "a\0"]).exit_code == 0


@pytest.mark.parametrize("option", ["--many", "--pick", "--count", "--folder", ""])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a\0", "without control characters, found U+0000 as character 2"),
        ("\x1b[1m", "without control characters, found U+001B as character 1"),
        ("bad\udcff", "in UTF-8, found something else as character 4"),
        ("x" * (LONGEST_TEXT + 1), "expected at most 4096 characters, found 4097"),
    ],
)
def test_what_cannot_is_refused_before_its_own_type_sees_it(option: str, value: str, words: str) -> None:
    done = call("name", f"{option}={value}") if option else call("--", value)
    assert done.exit_code == 2
    assert f"Invalid value for '{option or 'NAME'}': expected " in done.output
    assert words in done.output


@pytest.mark.parametrize(
    "words",
    [
        ("leaf", "name", "KEY"),
        ("leaf", "Authorization:", "Bearer", "KEY"),
        ("leaf", "KEY"),
        ("leaf", "name", "--many", "because of KEY"),
        ("leaf", "name", "--count=KEY"),
        ("leaf", "name", "--pick", "KEY"),
        ("leaf", "name", "--yes=KEY"),
        ("leaf", "name", "--KEY"),
        ("KEY",),
    ],
)
def test_a_key_is_not_said_again_wherever_it_was_typed(words: tuple[str, ...]) -> None:
    secret = "Zz09" * 10
    done = CliRunner().invoke(guarded(made), [word.replace("KEY", f"il_test_4k7q0m2x9abc_{secret}") for word in words])
    assert done.exit_code == 2
    assert "Zz09" not in done.output


def test_every_character_is_carried_or_refused_as_utf_8_says() -> None:
    for character in map(chr, (*range(0x300), *range(0xD7F0, 0xE010), 0xFFFF, 0x10FFFF)):
        try:
            character.encode()
            can = not (character < " " or "\x7f" <= character <= "\x9f")
        except UnicodeEncodeError:
            can = False
        assert (why_no_text(f"a{character}b") is None) == can, hex(ord(character))


@pytest.mark.parametrize(
    "text",
    [
        "2000-01-01",
        "2000-01-01T14:00+14:00",
        "2199-12-31T23:59:59.999999Z",
        "2200-01-01T14:00:00+14:00",
        "2199-12-31T09:59:59-14:00",
        " 2026-03-01t14:00z ",
        "2026-03-01T14:00:00.123456+05:45",
    ],
)
def test_a_time_that_is_taken_can_be_reckoned_with(text: str) -> None:
    found = iso_time(text)
    assert found.utcoffset() is not None
    assert hour_start(found) - CLOCK_MARGIN <= found <= found.astimezone(timezone(timedelta(hours=14))) + CLOCK_MARGIN


def test_a_time_without_a_zone_is_utc() -> None:
    assert iso_time("2026-03-01T14:00") == datetime(2026, 3, 1, 14, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("value", "words"), [("nan", "expected a number"), ("inf", "x<=9"), ("-1", "0<=x"), ("x", "valid")]
)
def test_a_length_of_time_has_an_end(value: str, words: str) -> None:
    wait = click.Command("wait", params=[click.Option(["--wait"], type=Seconds(longest_s=9))])
    done = CliRunner().invoke(wait, ["--wait", value])
    assert done.exit_code == 2
    assert words in done.output
