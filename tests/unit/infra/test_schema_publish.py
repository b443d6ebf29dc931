from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from uuid import uuid4

import pytest

from infra.schema_publish import SchemaConflict, unpublished
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


def missing(*records: SchemaPublished | bytes) -> list[int]:
    log = [Record(r if isinstance(r, bytes) else encode(r), offset=n) for n, r in enumerate(records)]
    return [s.id for s in unpublished(LOCKED, log, topic="inference.schemas.v1")]


def test_only_what_the_log_lacks_is_missing() -> None:
    assert missing() == [s.id for s in LOCKED]
    # Who published it and when, and how the text was spaced, are no part of what an id means.
    assert missing(*(published(s) for s in LOCKED), published(LOCKED[0])) == []
    assert missing(published(LOCKED[2])) == [s.id for s in LOCKED if s.id != LOCKED[2].id]


def test_ids_that_only_the_log_has_are_a_newer_releases() -> None:
    assert missing(*(published(s) for s in LOCKED), published(replace(LOCKED[0], id=900))) == []


def test_one_id_for_two_schemas_is_refused_and_names_both() -> None:
    mine, other = LOCKED[2], LOCKED[3]
    newer = published(LOCKED[0], schema_id=41)
    with pytest.raises(SchemaConflict) as refused:
        missing(newer, published(other, schema_id=mine.id))
    words = str(refused.value)
    assert f"schema id {mine.id} is {mine.record} version 1 (fingerprint {mine.fingerprint})" in words
    assert f"{other.record} version 1 (fingerprint {other.fingerprint}) at offset 1" in words
    assert "give the schema of this branch a free id, 42 or higher" in words


@pytest.mark.parametrize("changes", [{"version": 7}, {"subject": "other-value"}, {"definition": "{}"}])
def test_everything_said_of_a_schema_is_compared(changes: dict[str, object]) -> None:
    with pytest.raises(SchemaConflict, match=f"schema id {LOCKED[0].id} "):
        missing(published(LOCKED[0], **changes))


def test_another_default_alone_is_told_as_such() -> None:
    definition = LOCKED[0].definition()
    definition["doc"] = "something else"
    with pytest.raises(SchemaConflict, match="the same with another subject, or another text of docs and defaults"):
        missing(published(LOCKED[0], definition=json.dumps(definition)))


def test_a_record_that_cannot_be_read_counts_as_absent() -> None:
    assert missing(b"junk", *(published(s) for s in LOCKED[1:])) == [LOCKED[0].id]


def test_the_schema_of_schemas_has_one_version() -> None:
    """A reader of any age must be able to read how newer schemas look, so this one record can never change."""
    assert [s.version for s in versions_of(SchemaPublished.SCHEMA)] == [1]
