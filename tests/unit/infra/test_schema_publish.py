from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from uuid import uuid4

import pytest

from infra.schema_publish import Compared, Comparison, SchemaConflict, UnknownHere
from schemas.codec import encode
from schemas.facts import SchemaPublished
from schemas.lockfile import LockedSchema, locked_schemas, versions_of

LOCKED = locked_schemas()


@dataclass
class Record:
    """A record of the topic."""

    value: bytes | None
    offset: int = 0
    topic: str = "inference.schemas.v1"
    partition: int = 0


def published(schema: LockedSchema, **changes: object) -> SchemaPublished:
    fields = {
        "event_id": uuid4(),
        "occurred_at": datetime.now(timezone.utc),
        "schema_id": schema.id,
        "subject": schema.subject,
        "version": schema.version,
        "record": schema.record,
        "fingerprint": schema.fingerprint,
        "definition": json.dumps(schema.definition(), indent=4),
    }
    return SchemaPublished(**{**fields, **changes})  # type: ignore[arg-type]


def compared(*records: SchemaPublished | bytes) -> Compared:
    comparison = Comparison(LOCKED, topic="inference.schemas.v1")
    for n, r in enumerate(records):
        comparison.take(Record(r if isinstance(r, bytes) else encode(r), offset=n))
    return comparison.compared()


def missing(*records: SchemaPublished | bytes) -> list[int]:
    return [s.id for s in compared(*records).missing]


def test_only_what_the_log_lacks_is_missing() -> None:
    assert missing() == [s.id for s in LOCKED]
    # Who published it and when, and how the text was spaced, are no part of what an id means.
    assert missing(*(published(s) for s in LOCKED), published(LOCKED[0])) == []
    assert missing(published(LOCKED[2])) == [s.id for s in LOCKED if s.id != LOCKED[2].id]


def test_ids_that_only_the_log_has_are_a_newer_releases() -> None:
    newer = [published(LOCKED[0], schema_id=900 - n, version=20 + n) for n in range(2)]
    found = compared(*(published(s) for s in LOCKED), *newer, newer[0])
    subject = LOCKED[0].subject
    assert list(found.missing) == []
    assert found.unknown_here == [
        UnknownHere(schema_id=899, subject=subject, version=21),
        UnknownHere(schema_id=900, subject=subject, version=20),
    ]


def test_a_version_of_a_subject_that_the_log_has_under_another_id_is_refused() -> None:
    mine = LOCKED[-1]
    with pytest.raises(SchemaConflict) as refused:
        missing(published(replace(mine, id=41)))
    words = str(refused.value)
    assert f"two branches used version {mine.version} of {mine.subject}: " in words
    assert f"has id {mine.id} as {mine.subject}" in words
    assert f"the log has id 41 as {mine.subject}" in words
    assert words.endswith("inferlog schemas add --id 42")


def test_one_id_for_two_schemas_is_refused_and_names_both() -> None:
    mine, other = LOCKED[2], LOCKED[3]
    newer = published(LOCKED[0], schema_id=41, version=9)
    with pytest.raises(SchemaConflict) as refused:
        missing(newer, published(other, schema_id=mine.id))
    words = str(refused.value)
    assert f"two branches used id {mine.id}: " in words
    assert f"has id {mine.id} as {mine.subject} version 1 (fingerprint {mine.fingerprint})" in words
    assert f"id {mine.id} as {other.subject} version 1 (fingerprint {other.fingerprint}) (offset 1 of " in words
    assert "inferlog down --wipe" in words
    assert words.endswith("inferlog schemas add --id 42")


@pytest.mark.parametrize("changes", [{"version": 7}, {"subject": "other-value"}, {"definition": "{}"}])
def test_everything_said_of_a_schema_is_compared(changes: dict[str, object]) -> None:
    with pytest.raises(SchemaConflict, match=f"two branches used id {LOCKED[0].id}: "):
        missing(published(LOCKED[0], **changes))


def test_another_default_alone_is_told_as_such() -> None:
    definition = LOCKED[0].definition()
    definition["doc"] = "something else"
    with pytest.raises(SchemaConflict, match="the log has the same with another text of docs and defaults"):
        missing(published(LOCKED[0], definition=json.dumps(definition)))


def test_a_record_that_cannot_be_read_counts_as_absent() -> None:
    assert missing(b"junk", *(published(s) for s in LOCKED[1:])) == [LOCKED[0].id]


def test_what_only_the_log_has_is_held_by_its_name_alone() -> None:
    """Each such record may have megabytes, and there may be any number of them."""
    huge = published(LOCKED[0], schema_id=900, version=20, subject="s" * 100_000, definition="d" * 100_000)
    (unknown,) = compared(huge).unknown_here
    assert len(unknown.subject) == 300


def test_the_schema_of_schemas_has_one_version() -> None:
    """A reader of any age must be able to read how newer schemas look, so this one record can never change."""
    assert [s.version for s in versions_of(SchemaPublished.SCHEMA)] == [1]
