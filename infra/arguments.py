"""What any option or argument of a command may hold: text that servers and files can carry, times, lengths of time.

One place for all commands: `infra.cli` puts `guarded` around whatever it loads, so none can be forgotten.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, Final

import click

from schemas.ranges import MOMENTS

#: No name, path or reason of ours is longer; what is would come back whole in the message that refuses it.
LONGEST_TEXT: Final = 4096
# Control characters: no server takes NUL, and the others break the line that says what is wrong. Half characters: how
# Python shows bytes of an argument that are not UTF-8, which nothing can be told of in UTF-8.
_UNCARRIED: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


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


def _carried(own: click.ParamType) -> click.ParamType:
    """The same type, which hears no text that `why_no_text` refuses."""

    def convert(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and (why := why_no_text(value)) is not None:
            own.fail(why, param, ctx)
        return own.convert(value, param, ctx)

    # A copy, since click shares its types between parameters; no class of its own, since help goes by a type's class.
    held = copy.copy(own)
    held.convert = convert  # type: ignore[method-assign]
    return held


def guarded(command: click.Command) -> click.Command:
    """The same command, and those below it, with every text held to `why_no_text`."""
    held = copy.copy(command)
    held.params = [copy.copy(parameter) for parameter in command.params]
    for parameter in held.params:
        parameter.type = _carried(parameter.type)
    if isinstance(held, click.Group):
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
