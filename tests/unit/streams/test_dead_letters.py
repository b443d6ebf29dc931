"""Evidence goes to Postgres in pieces that it takes, and all of it goes."""

from __future__ import annotations

from schemas.evidence import dead_letter
from schemas.records import DeadLetter
from streams.dead_letters import in_slices
from tests.unit.streams.usage_samples import NOON, raw


def letters(*sizes_bytes: int) -> list[DeadLetter]:
    return [dead_letter(raw(b"x" * size, n), "broken", occurred_at=NOON) for n, size in enumerate(sizes_bytes)]


def test_a_slice_is_bounded_by_its_evidence_and_none_is_lost() -> None:
    given = letters(40, 40, 40, 500, 0, 10)
    cut = list(in_slices(given, max_bytes=100))
    assert [[x.offset for x in part] for part in cut] == [[0, 1], [2], [3], [4, 5]]
    assert [x for part in cut for x in part] == given
    assert list(in_slices([], max_bytes=100)) == []
