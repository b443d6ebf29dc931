"""How letters are shown: bytes as they are, and nothing that a terminal obeys."""

from __future__ import annotations

from datetime import timedelta

from schemas.codec import encode
from schemas.records import InferenceFinished, UsageRecorded
from streams.quarantine.letters import Letter, Place, State
from streams.quarantine.rendering import decoded, hex_lines, letter_lines, outcome_line, shown, size
from streams.quarantine.settling import Outcome
from tests.factories import finished
from tests.unit.streams.usage_samples import NOON, usage

NS = "t1"


def test_a_list_is_aligned_and_sends_no_escape_to_the_terminal() -> None:
    letters = [
        Letter(
            place=Place(topic="t1.inference.usage.v1", partition=n, offset=10**n),
            kind=kind,
            state=State.OPEN,
            reason=reason,
            seen_at=NOON + timedelta(seconds=n),
            size_bytes=size_bytes,
        )
        for n, kind, reason, size_bytes in [
            (1, "undecodable", "found \x1b[2J\r\n\u202e" + "x" * 200, 14),
            (2, None, "short", 2_500_000),
        ]
    ]
    lines = letter_lines(letters, namespace=NS, with_state=False)
    assert lines == [
        "set aside at          place        kind         size    reason",
        "2026-03-01T12:00:01Z  usage/1/10   undecodable  14 B    "
        + ("found \\x1b[2J\\r\\n\\u202e" + "x" * 200)[:99]
        + "…",
        "2026-03-01T12:00:02Z  usage/2/100  -            2.5 MB  short",
    ]
    assert letter_lines(letters, namespace=NS, with_state=True)[2].split()[2] == "open"


def test_bytes_are_shown_beside_their_text_up_to_a_limit() -> None:
    assert hex_lines(b"0123456789abcdef\x00\x1b", limit=17) == [
        "00000000  30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66  0123456789abcdef",
        "00000010  00                                               .",
        "… and 1 more bytes",
    ]
    assert hex_lines(b"", limit=17) == []


def test_what_decodes_is_shown_whatever_topic_it_was_on() -> None:
    record = usage(1)
    assert decoded(encode(record), expected=UsageRecorded) == (record, None)
    found, why = decoded(encode(record), expected=InferenceFinished)
    assert found == record
    assert why is not None
    assert "expected inferlog.inference.v1.InferenceFinished" in why
    assert decoded(b"x", expected=type(finished()))[0] is None
    assert decoded(None, expected=UsageRecorded)[1] == "expected UsageRecorded, found a record without a value"


def test_figures_for_people() -> None:
    assert [size(n) for n in (None, 0, 9_999, 10_000, 1_048_576)] == ["-", "0 B", "9999 B", "10 kB", "1.0 MB"]
    assert outcome_line({}, dry=False) == "no letters"
    assert outcome_line({Outcome.REFUSED: 2, Outcome.COUNTED: 3}, dry=True) == "would be: 3 counted, 2 refused"
    assert shown("größe ✓") == "größe ✓"
