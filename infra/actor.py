"""Who changes something and why: the options `--actor` and `--reason` of every command that writes a fact.

A fact without a name answers nobody's question, so there is always one: what was said, else the account that runs the
command.
"""

from __future__ import annotations

import functools
import getpass
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click

from infra.environment import load_environment
from schemas.headers import Stamp

R = TypeVar("R")

LONGEST_ACTOR: Final = 200
LONGEST_REASON: Final = 1000
#: Producer of every fact that a command writes.
COMMAND_STAMP: Final = Stamp("inferlog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who makes a change, and why in their words; None when they did not say."""

    actor: str
    reason: str | None = None


def author(actor: str | None, reason: str | None, env: Mapping[str, str] | None = None) -> Author:
    """The actor as given, else INFERLOG_ACTOR, else the account of this process.

    Raises ValueError naming the option or variable whose text a fact cannot carry.
    """
    said = load_environment() if env is None else env
    if actor is not None:
        name, source = actor, "--actor"
    elif "INFERLOG_ACTOR" in said:
        name, source = said["INFERLOG_ACTOR"], "INFERLOG_ACTOR"
    else:
        name, source = _account(), "the account's name"
    _require_text(source, name, LONGEST_ACTOR)
    if reason is not None:
        _require_text("--reason", reason, LONGEST_REASON)
    return Author(actor=name, reason=reason)


def authored(*, reason_required: bool = False) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the two options; it is called with `by`, an Author."""

    def wrap(command: Callable[..., R]) -> Callable[..., R]:
        @click.option("--actor", help="Who makes the change; INFERLOG_ACTOR, else your account's name, if left out.")
        @click.option("--reason", required=reason_required, help="Why, in your words; kept with the change for ever.")
        @functools.wraps(command)
        def call(*args: Any, actor: str | None, reason: str | None, **kwargs: Any) -> R:
            try:
                by = author(actor, reason)
            except ValueError as error:
                raise click.UsageError(str(error)) from error
            return command(*args, by=by, **kwargs)

        return call

    return wrap


def _account() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # an account without a name, as in some containers
        return f"uid {os.getuid()}"


def _require_text(source: str, text: str, longest: int) -> None:
    # Printable text holds no control characters, and no half characters that UTF-8 cannot carry.
    if not text.strip() or len(text) > longest or not text.isprintable():
        raise ValueError(f"{source}: expected 1 to {longest} printable characters, found {text[:40]!r}")
