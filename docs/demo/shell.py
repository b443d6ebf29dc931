"""The demo's hands: it drives the product only through commands and HTTP, as a user would.

Every step prints what it is doing and how long it took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent.parent


class DemoFailed(RuntimeError):
    """A command of the product failed; the message holds the command and what it printed."""


def say(line: str) -> None:
    """One line of progress, at once."""
    print(line, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a step, and say how long it took."""
    started = time.monotonic()
    say(f"\n== {title}")
    yield
    say(f"   done in {time.monotonic() - started:.1f} s")


def inferlog(*arguments: str, show: bool = False) -> str:
    """Run `inferlog …` and return what it printed. Raises DemoFailed when it exits non-zero."""
    command = [str(_BIN / "inferlog"), *arguments]
    if show:
        say("   $ inferlog " + " ".join(arguments))
    # In a session of its own, so that Ctrl-C reaches the demo alone: it ends the command, and says one sentence.
    done = subprocess.run(
        command,
        capture_output=not show,
        text=True,
        cwd=ROOT,
        env=os.environ,
        timeout=600,
        check=False,
        start_new_session=True,
    )
    if done.returncode != 0:
        raise DemoFailed(
            f"'inferlog {' '.join(arguments)}' exited {done.returncode}\n{done.stdout or ''}{done.stderr or ''}"
        )
    return done.stdout or ""


def inferlog_json(*arguments: str) -> Any:
    """Run `inferlog … --json` and return the parsed object."""
    return json.loads(inferlog(*arguments, "--json"))
