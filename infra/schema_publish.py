"""The lock file's schemas, put on the log: one SchemaPublished per id, those that are not there yet.

Done before new writers start, so that processes of older code can read what they write.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from infra.kafka import open_producer
from infra.schema_topic import open_schema_topic
from infra.settings import KafkaSettings
from schemas.codec import DecodeError, Placed, decode_at, encode
from schemas.facts import SchemaPublished
from schemas.headers import Stamp
from schemas.ids import schema_id_event
from schemas.lockfile import LOCK_FILE, LockedSchema, locked_schemas, text_digest
from schemas.topics import SCHEMAS

log = logging.getLogger(__name__)

_ACK_WITHIN_S = 15.0
_STAMP = Stamp("provision")
#: Longer than any; a subject is a topic's name, which has 249 at most, and what it holds.
_SUBJECT_CHARS = 300


class SchemaConflict(RuntimeError):
    """An id, or a version of a subject, is one schema here and another on the log; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownHere:
    """A schema that is on the log and not in the lock file: a newer release's, or that of another branch."""

    schema_id: int
    subject: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The lock file against the log: what the log lacks, and what only the log has."""

    missing: Sequence[LockedSchema]
    unknown_here: Sequence[UnknownHere]


class Comparison:
    """The lock file against the log: `take` every record of the topic, in order, then ask for `compared`.

    Everything a record says of its schema is compared; its `event_id` and `occurred_at` say nothing of it. A record
    that cannot be read counts as absent. Held is what an id says, not how.
    """

    def __init__(self, locked: Sequence[LockedSchema], *, topic: str) -> None:
        self._locked = locked
        self._topic = topic
        self._by_id = {schema.id: schema for schema in locked}
        self._by_version = {(schema.subject, schema.version): schema for schema in locked}
        self._highest = max(self._by_id, default=0)
        self._found: set[int] = set()
        self._unknown: dict[int, UnknownHere] = {}
        self._conflict: tuple[LockedSchema, SchemaPublished, int] | None = None

    def take(self, record: Placed) -> None:
        """The next record of the topic."""
        try:
            published = decode_at(record, SchemaPublished)
        except DecodeError as error:
            log.error("no schema can be read here: %s", error)
            return
        self._highest = max(self._highest, published.schema_id)
        schema = self._by_id.get(published.schema_id)
        if schema is None:
            subject = published.subject[:_SUBJECT_CHARS]
            its = UnknownHere(schema_id=published.schema_id, subject=subject, version=published.version)
            self._unknown[published.schema_id] = its
            schema = self._by_version.get((published.subject, published.version))
        if schema is not None and _told_by(schema) != _told(published):
            self._conflict = self._conflict or (schema, published, record.offset)
        self._found.add(published.schema_id)

    def compared(self) -> Compared:
        """What each side lacks. Raises SchemaConflict when a record on the log has an id of these, or a version of one
        of their subjects, for another schema."""
        if self._conflict is not None:
            raise _refusal(*self._conflict, topic=self._topic, free_id=self._highest + 1)
        return Compared(
            missing=[schema for schema in self._locked if schema.id not in self._found],
            unknown_here=[self._unknown[schema_id] for schema_id in sorted(self._unknown)],
        )


async def publish_schemas(
    settings: KafkaSettings, *, locked: Sequence[LockedSchema] | None = None, check: bool = False
) -> Compared:
    """Put these schemas (those of the lock file) on the log where they are missing, and say how the two differed.

    With `check` nothing is written. Raises SchemaConflict, and then nothing was; BusUnavailable.
    """
    topic = SCHEMAS.in_namespace(settings.namespace).name
    comparison = Comparison(locked_schemas() if locked is None else locked, topic=topic)
    async with open_schema_topic(settings) as reader:
        await reader.read(0, comparison.take)
    found = comparison.compared()
    if found.missing and not check:
        now = datetime.now(timezone.utc)
        headers = _STAMP.headers(SchemaPublished)
        # One partition and one producer: they lie there in the order of their ids. Dying in between leaves the first
        # of them, and the next run adds the rest.
        async with open_producer(settings, linger_ms=5) as producer:
            sent = [
                await producer.enqueue(
                    topic,
                    encode(_published(schema, now)),
                    key=str(schema.id).encode(),
                    headers=headers,
                    timeout_s=_ACK_WITHIN_S,
                )
                for schema in found.missing
            ]
            await producer.acknowledged(sent, timeout_s=_ACK_WITHIN_S)
    return found


def _published(schema: LockedSchema, now: datetime) -> SchemaPublished:
    return SchemaPublished(
        event_id=schema_id_event(schema.id),
        occurred_at=now,
        schema_id=schema.id,
        subject=schema.subject,
        version=schema.version,
        record=schema.record,
        fingerprint=schema.fingerprint,
        definition=json.dumps(schema.definition(), ensure_ascii=False),
    )


def _told_by(schema: LockedSchema) -> tuple[object, ...]:
    return schema.id, schema.record, schema.fingerprint, schema.subject, schema.version, schema.sha256


def _told(published: SchemaPublished) -> tuple[object, ...]:
    p = published
    try:
        digest = text_digest(json.loads(p.definition))
    except ValueError:
        digest = "not JSON"
    return p.schema_id, p.record, p.fingerprint, p.subject, p.version, digest


def _refusal(
    schema: LockedSchema, published: SchemaPublished, offset: int, *, topic: str, free_id: int
) -> SchemaConflict:
    what = f"id {schema.id}" if schema.id == published.schema_id else f"version {schema.version} of {schema.subject}"
    here = _words(schema.id, schema.subject, schema.version, schema.fingerprint)
    there = _words(published.schema_id, published.subject, published.version, published.fingerprint)
    if here == there:
        there = "the same with another text of docs and defaults"
    return SchemaConflict(
        f"two branches used {what}: {LOCK_FILE} has {here}, and the log has {there} (offset {offset} of {topic}). No "
        "schema was published, and what is on the log stays. On a local stack  inferlog down --wipe  starts afresh, "
        "without its data. Elsewhere the branch that came second must be rebased onto the one whose schema is on the "
        "log, take its own out of the lock file, and add it again as the next version with  "
        f"inferlog schemas add --id {free_id}"
    )


def _words(schema_id: int, subject: str, version: int, fingerprint: str) -> str:
    return f"id {schema_id} as {subject} version {version} (fingerprint {fingerprint})"
