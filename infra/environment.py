"""Where settings come from: the process environment, over the file that the local stack writes.

`stack.env` lies in the home folder (`INFERLOG_HOME`, else the nearest `.inferlog` upwards). Mistakes are collected and
reported together, so that one run tells all there is to mend.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from infra.arguments import why_no_text

ENV_FILE: Final = "stack.env"
HOME_NAME: Final = ".inferlog"


class SettingsError(ValueError):
    """One or more settings are missing or malformed; the message lists every one and what to do."""


def home_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder that holds the local stack's state.

    INFERLOG_HOME, else the `.inferlog` of the current folder or of the nearest folder above that has a stack, else
    `.inferlog` in the current folder.
    """
    env = os.environ if environ is None else environ
    if env.get("INFERLOG_HOME"):
        return Path(env["INFERLOG_HOME"]).absolute()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / HOME_NAME / ENV_FILE).is_file():
            return folder / HOME_NAME
    return here / HOME_NAME


def load_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings by name: the lines KEY=VALUE of `<home>/stack.env`, overridden by the process environment."""
    env = dict(os.environ if environ is None else environ)
    path = home_dir(env) / ENV_FILE
    found: dict[str, str] = {}
    if path.is_file():
        # As the process environment does it; what is not UTF-8 is then refused by the name of its setting.
        for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            name, separator, value = line.partition("=")
            if separator and not line.startswith("#"):
                found[name.strip()] = value.strip()
    found.update((k, v) for k, v in env.items() if k.startswith("INFERLOG_"))
    return found


class SettingsReader:
    """Reads settings one by one, remembers every mistake, and reports them together in `finish`."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._mistakes: list[str] = []

    def text(self, name: str, default: str | None = None) -> str:
        """The setting as text; without a default it must be present."""
        value = self._env.get(name, default)
        if value is None:
            self._mistakes.append(f"{name} is not set")
            return ""
        if (why := why_no_text(value)) is not None:
            self._mistakes.append(f"{name}: {why}")
        return value

    def choice(self, name: str, pattern: str, default: str, expected: str) -> str:
        """The setting as text that matches `pattern` whole; `expected` says so in words."""
        value = self.text(name, default)
        if not re.fullmatch(pattern, value):
            self._mistakes.append(f"{name} is {value!r}, expected {expected}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """The setting as a number between `low` and `high`."""
        raw = self._env.get(name)
        if raw is None:
            return default
        try:
            value = float(raw)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            self._mistakes.append(f"{name} is {raw!r}, expected a number from {low:g} to {high:g}")
            return default
        return value

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        """The setting as a whole number between `low` and `high`."""
        return int(self.number(name, default, low=low, high=high))

    def refuse(self, why: str) -> None:
        """Note a mistake that a bound alone does not explain."""
        self._mistakes.append(why)

    def finish(self) -> None:
        """Raise SettingsError listing every mistake met so far."""
        if self._mistakes:
            raise SettingsError(
                "; ".join(self._mistakes)
                + f" (set the variable, or start the local stack with 'inferlog up', which writes {ENV_FILE})"
            )
