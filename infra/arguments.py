"""What any option or argument of a command may hold: text that servers and files can carry and no API key, times,
lengths of time.

One place for all commands: `infra.cli` puts `guarded` around whatever it loads, so none can be forgotten.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, Final, TypeVar

import click

from schemas.ranges import MOMENTS

R = TypeVar("R")

#: No name, path or reason of ours is longer; what is would come back whole in the message that refuses it.
LONGEST_TEXT: Final = 4096
# Control characters: no server takes NUL, and the others break the line that says what is wrong. Half characters: how
# Python shows bytes of an argument that are not UTF-8, which nothing can be told of in UTF-8.
_UNCARRIED: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# An API key and what is left of one that was copied badly: whoever refuses it must not print it, and no record may keep
# it, as a reason would for ever.
_KEY: Final = re.compile(r"il_[a-z0-9]{1,12}_([0-9a-z]{12})_[0-9A-Za-z]{8,}")


def why_no_text(text: str) -> str | None:
    """Why a server or a file cannot carry this text, in words without it; None when it can."""
    if len(text) > LONGEST_TEXT:
        return f"expected at most {LONGEST_TEXT} characters, found {len(text)}"
    if found := _UNCARRIED.search(text):
        at = found.start() + 1
        if found[0] < "\ud800":
            return f"expected text without control characters, found U+{ord(found[0]):04X} as character {at}"
        return f"expected text in UTF-8, found something else as character {at}"
    return None


def id_in_key(text: str) -> str | None:
    """The public id of the API key that stands in this text, None when there is none."""
    found = _KEY.search(text)
    return None if found is None else found[1]


def _carried(own: click.ParamType) -> click.ParamType:
    """The same type, which hears no text that `why_no_text` refuses, and no API key unless it takes the id of one."""

    def convert(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and (why := why_no_text(value)) is not None:
            own.fail(why, param, ctx)
        key_id = id_in_key(value) if isinstance(value, str) and not isinstance(own, KeyId) else None
        if key_id is not None:
            own.fail(f"expected no secret, found a whole API key; its id is {key_id}", param, ctx)
        return own.convert(value, param, ctx)

    # A copy, since click shares its types between parameters; no class of its own, since help goes by a type's class.
    held = copy.copy(own)
    held.convert = convert  # type: ignore[method-assign]
    return held


def _unsaid(method: Callable[[click.Context, list[str]], R]) -> Callable[[click.Context, list[str]], R]:
    """The same method of a command, whose errors repeat no key: click quotes words where it expected none."""

    def call(ctx: click.Context, args: list[str]) -> R:
        try:
            return method(ctx, args)
        except click.UsageError as error:
            error.message = _KEY.sub(r"(a whole API key with the id \1)", error.message)
            raise

    return call


def guarded(command: click.Command) -> click.Command:
    """The same command, and those below it, with every text held to `why_no_text` and no API key said again."""
    held = copy.copy(command)
    held.parse_args = _unsaid(held.parse_args)  # type: ignore[assignment, method-assign]
    held.params = [copy.copy(parameter) for parameter in command.params]
    for parameter in held.params:
        parameter.type = _carried(parameter.type)
    if isinstance(held, click.Group):
        held.resolve_command = _unsaid(held.resolve_command)  # type: ignore[assignment, method-assign]
        held.commands = {name: guarded(below) for name, below in held.commands.items()}
    return held


def iso_time(text: str) -> datetime:
    """An aware time of ISO 8601, within what records may say; without a zone it is UTC.

    Margins, zones and whole hours can be reckoned with it, and never leave the calendar. Raises ValueError saying what
    was expected.
    """
    try:
        found = datetime.fromisoformat(text.strip().replace("Z", "+00:00").replace("z", "+00:00"))
    except ValueError:
        raise ValueError(f"{text!r} is not an ISO 8601 time, expected for example 2026-03-01T14:00Z") from None
    found = found if found.tzinfo else found.replace(tzinfo=timezone.utc)
    if not MOMENTS.low <= found <= MOMENTS.high:
        raise ValueError(f"{text!r} is out of range, expected {MOMENTS.words}")
    return found


class Parsed(click.ParamType):
    """What a function makes of text; its ValueError becomes click's own error, naming the option."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; one that is no text any more stays as it is."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


class KeyId(click.ParamType):
    """The id of an API key. A whole key stands for its own id: who revokes a key that leaked often has nothing else."""

    name = "key id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The id; what else of a whole key there is goes nowhere."""
        key_id = id_in_key(str(value))
        if key_id is None:
            return value
        click.echo(f"note: a whole key was given; its id is {key_id}", err=True)
        return key_id


class Moment(Parsed):
    """An ISO 8601 date or time, aware; without a zone it is UTC."""

    def __init__(self) -> None:
        super().__init__("ISO time", iso_time)


class Seconds(click.FloatRange):
    """A length of time from 0 to `max` seconds; no number (nan) is none, and would be waited for without an end."""

    def __init__(self, *, longest_s: float) -> None:
        super().__init__(min=0, max=longest_s)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or click's own error naming the option."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"expected a number of seconds, found {value!r}", param, ctx)
        return found
