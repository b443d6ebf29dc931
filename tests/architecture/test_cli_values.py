"""Whatever stands in an option of a command, the answer is a line of words: walked over the tree of all commands.

There are no servers here: what is not refused for what it says ends at a port that nobody listens on.
"""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from api.access.key_shape import mint
from infra.arguments import LONGEST_TEXT, KeyId
from infra.cli import main
from schemas.gate import commands as gate_commands
from schemas.gate.checkout import Checkout
from tests.architecture.test_cli import LEAVES
from tests.checkouts import copy_checkout
from tests.processes import free_port

#: What no server and no file can carry, and what is longer than any name.
UNCARRIED = [
    "a\0b",
    "\0",
    "bad\udcff",
    "\ud800",
    "\udfff.csv",
    "\n",
    "a\r\nb",
    "\t",
    "\x1b[31m",
    "\x7f",
    "\x85",
    "x" * (LONGEST_TEXT + 1),
    "x" * 1_000_000,
]
#: No times, or times that leave the calendar once a margin or a zone is added.
NO_TIMES = [
    "",
    " ",
    "yesterday",
    "0001-01-01",
    "0001-01-01T00:00+14:00",
    "0001-01-01T00Z",
    "1969-12-31T23:59:59Z",
    "9999-12-31",
    "9999-12-31T23:59:59.999999-14:00",
    "9999-12-31T23",
    "10000-01-01",
    "2026-06-30T23:59:60Z",
    "2026-02-30",
    "2026-03-01T14:00+25:00",
    "2026-03-01T14:00+99:99",
    "infinity",
    "-infinity",
]
NO_NUMBERS = ["", " ", "x", "nan", "inf", "-inf", "1e999", "0x1", "\u0661\u0662x"]
#: Text that can be carried; only somebody who looks it up can say what is wrong with it.
ODD = ["", " ", "-", "--", "\u202e", "\u0661", "é" * 300, "'; --", "%s", "{}", "../..", "/", "9" * 400, "-1", "1e5"]
ODD += ["99999999999999999999", "1" + "0" * 30 + "d", "999999d", "items=-1", "a=b=c", "*", "\ufeff"]

#: Every parameter that takes a value, by command and name.
VALUED: dict[tuple[str, str], click.Parameter] = {
    (name, parameter.human_readable_name): parameter
    for name, command in LEAVES.items()
    for parameter in command.params
    if not getattr(parameter, "is_flag", False)
}
TIMES = [place for place, parameter in VALUED.items() if parameter.type.name in ("ISO time", "UTC hour")]
NUMBERS = [p for p, parameter in VALUED.items() if isinstance(parameter.type, (type(click.INT), type(click.FLOAT)))]
#: Where which values are refused for what they say.
REFUSED = {
    f"{' '.join(place)} {kind}": (place, values)
    for kind, places, values in (
        ("uncarried", VALUED, UNCARRIED),
        ("no time", TIMES, NO_TIMES),
        ("no number", NUMBERS, NO_NUMBERS),
    )
    for place in places
}


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings of servers that are not there, and a checkout of this test's own."""
    port = free_port()
    addresses = {
        "KAFKA_BOOTSTRAP": f"127.0.0.1:{port}",
        "POSTGRES_DSN": f"postgresql://nobody@127.0.0.1:{port}/none",
        "REDIS_URL": f"redis://127.0.0.1:{port}/0",
        "S3_ENDPOINT": f"http://127.0.0.1:{port}",
        "S3_ACCESS_KEY": "x",
        "S3_SECRET_KEY": "x",
        "ACTOR": "a test",
        "HOME": str(tmp_path / "home"),
    }
    for name, value in addresses.items():
        monkeypatch.setenv(f"INFERLOG_{name}", value)
    (tmp_path / "checkout").mkdir()
    checkout = Checkout(root=copy_checkout(tmp_path / "checkout"))
    monkeypatch.setattr(gate_commands, "Checkout", lambda: checkout)
    monkeypatch.chdir(checkout.root)


def _harmless(parameter: click.Parameter, folder: Path) -> str:
    """A value that this parameter takes."""
    kind = parameter.type
    if isinstance(kind, click.Path):
        return str(folder if kind.dir_okay else folder / "pyproject.toml")
    if isinstance(kind, click.Choice):
        return str(kind.choices[0])
    return {"ISO time": "2026-03-01", "UTC hour": "2026-03-01T12"}.get(kind.name, "1")


def _called(place: tuple[str, str], value: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status of a command with this value in one place, and what it said: its errors, if there are any."""
    status, out, err = _printed(place, value, capsys)
    return status, err or out


def _printed(place: tuple[str, str], value: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit status of a command with this value in one place, and both its outputs."""
    name, evil = place
    options: list[str] = []
    arguments: list[str] = []
    for parameter in LEAVES[name].params:
        is_evil = parameter.human_readable_name == evil
        if not (is_evil or parameter.required):
            continue
        given = value if is_evil else _harmless(parameter, Path.cwd())
        if isinstance(parameter, click.Option):
            options.append(f"{parameter.opts[0]}={given}")
        else:
            arguments.append(given)
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), *options, "--", *arguments])
    out, err = capsys.readouterr()
    status = ended.value.code
    assert isinstance(status, int)
    return status, out, err


def test_every_command_is_walked() -> None:
    known = {name for name, _ in VALUED}
    assert {"keys create", "billing adjust", "export", "usage", "models publish", "schemas add"} <= known
    assert {("verify", "since"), ("export", "since"), ("export", "until"), ("billing adjust", "hour")} <= set(TIMES)
    assert ("verify", "wait_timeout_s") in NUMBERS


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_by_the_name_of_its_option(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place, values = REFUSED[case]
    parameter = VALUED[place]
    named = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
    for value in values:
        status, said = _called(place, value, capsys)
        last = said.splitlines()[-1]
        assert (status, last[:6]) == (2, "Error:"), (value[:50], said[-500:])
        assert named in last, (value[:50], last)
        assert len(last) < 500, "it is not all said again"


@pytest.mark.parametrize("place", VALUED, ids=" ".join)
def test_a_whole_key_is_never_said_again_and_counts_as_its_id_where_one_is_asked_for(
    place: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that was copied with its header, or badly: most of a secret is one, too."""
    minted = mint("test")
    whole = minted.secret
    asks_for_an_id = isinstance(VALUED[place].type, KeyId)
    for value in (whole, f"Authorization: Bearer {whole}", f"acme={whole}", whole[:-1], whole[:40], whole + "\u202e"):
        status, out, err = _printed(place, value, capsys)
        assert whole[21:37] not in out + err
        assert minted.key_id in err
        if asks_for_an_id:
            assert f"a whole key was given; its id is {minted.key_id}" in err
        else:
            assert status == 2, err
            assert "expected no secret, found a whole API key" in err


def test_every_key_id_may_be_a_whole_key() -> None:
    named = {name for name, parameter in VALUED if parameter == "KEY_ID"}
    assert named == {name for (name, _), parameter in VALUED.items() if isinstance(parameter.type, KeyId)}
    assert named == {f"keys {verb}" for verb in ("show", "rotate", "revoke", "scope", "limits", "expire")}


@pytest.mark.parametrize("place", VALUED, ids=" ".join)
def test_whatever_else_is_said_there_is_no_traceback(
    place: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in (*ODD, *NO_TIMES, *NO_NUMBERS):
        status, said = _called(place, value, capsys)  # an exception would come through
        assert status in (0, 1, 2), (value, said)
        assert said.strip(), value
