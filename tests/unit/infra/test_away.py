"""That a server is away is worded in one place, whichever command finds it out."""

from __future__ import annotations

import re
from pathlib import Path

from infra.away import unanswered

ROOT = Path(__file__).resolve().parents[3]
OWN_WORDS = re.compile(r"(does not answer|cannot be reached|is away)[^\"']{0,60}: ?\{")


def test_the_line_says_which_server_why_and_where_to_look() -> None:
    said = unanswered("Postgres", ConnectionRefusedError(111, "Connect call failed"))
    assert said == "Postgres does not answer: [Errno 111] Connect call failed (see  inferlog status)"
    assert "TimeoutError" in unanswered("Kafka", TimeoutError())


def test_no_command_has_words_of_its_own() -> None:
    commands = [*ROOT.glob("streams/**/*commands.py"), *ROOT.glob("streams/**/*_command.py"), ROOT / "infra/cli.py"]
    assert len(commands) > 10
    for path in [*commands, ROOT / "streams/quarantine/options.py"]:
        assert not OWN_WORDS.search(path.read_text(encoding="utf-8")), path
