"""Evidence goes to Postgres in pieces that it takes, all of it; and a reason says of what kind a letter is."""

from __future__ import annotations

import pytest

from schemas.evidence import dead_letter
from schemas.records import DeadLetter
from streams.ledger.dead_letters import AllRecordsBad, Kind, in_slices, kind_of, refuse_if_systemic
from streams.ledger.sorting import Sorting
from tests.unit.streams.usage_samples import NOON, raw, usage


def letters(*sizes_bytes: int) -> list[DeadLetter]:
    return [dead_letter(raw(b"x" * size, n), "broken", occurred_at=NOON) for n, size in enumerate(sizes_bytes)]


def test_a_slice_is_bounded_by_its_evidence_and_none_is_lost() -> None:
    given = letters(40, 40, 40, 500, 0, 10)
    cut = list(in_slices(given, max_bytes=100))
    assert [[x.offset for x in part] for part in cut] == [[0, 1], [2], [3], [4, 5]]
    assert [x for part in cut for x in part] == given
    assert list(in_slices([], max_bytes=100)) == []


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"", Kind.UNDECODABLE),
        (None, Kind.UNDECODABLE),
        (b"\x00\x00\x00\x27\x0fxx", Kind.UNKNOWN_SCHEMA),
        (usage(1, quantities={"items": -1}), Kind.UNDECODABLE),
        (usage(1, customer=""), Kind.UNFIT),
        (usage(1, quantities={}), Kind.UNFIT),
        (usage(1, quantities={"": 1}), Kind.UNFIT),
    ],
)
def test_what_the_ledger_sets_aside_has_a_kind(value: object, kind: Kind) -> None:
    records, sorting = [raw(value, 0)], Sorting(now=NOON)  # type: ignore[arg-type]
    sorting.take(records)
    (letter,) = sorting.batch(records, began_s=0.0).dead
    assert kind_of(letter.reason) is kind


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("request 0190-af: differs from the usage record that was counted for it", Kind.CONTRADICTING),
        ("NumericValueOutOfRangeError: bigint out of range", Kind.UNFIT),
        ("occurred_at: 2020-01-01T00:00:00Z is past the horizon of 40 days", Kind.HORIZON),
        ("request_id: 0190-af is older than the dedup horizon, 2020-01-01T00:00:00Z: whether", Kind.HORIZON),
        ("occurred_at: 2099-01-01T00:00:00Z is in the future", Kind.FUTURE),
        ("", Kind.UNDECODABLE),
    ],
)
def test_reasons_of_every_kind_are_told_apart(reason: str, kind: Kind) -> None:
    assert kind_of(reason) is kind


def test_a_batch_of_nothing_good_names_the_command_that_shows_it() -> None:
    dead = letters(*[1] * 100)
    with pytest.raises(AllRecordsBad, match=r"inferlog dead-letters show inference\.usage\.v1/0/0\)"):
        refuse_if_systemic(dead, total=100)
    refuse_if_systemic(dead, total=101)
