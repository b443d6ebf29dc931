"""The lock file's schemas, put on the log: one SchemaPublished per id, those that are not there yet.

Done before new writers start, so that processes of older code can read what they write.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
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


class SchemaConflict(RuntimeError):
    """An id means one schema here and another on the log; the message names both and what to do."""


def unpublished(locked: Sequence[LockedSchema], on_log: Sequence[Placed], *, topic: str) -> list[LockedSchema]:
    """Those that the log lacks. Raises SchemaConflict when one of its records has an id of these for another schema.

    Everything a record says of its schema is compared; its `event_id` and `occurred_at` say nothing of it. Ids that
    only the log has are a newer release's. A record that cannot be read counts as absent.
    """
    by_id = {schema.id: schema for schema in locked}
    highest, found = max(by_id, default=0), set()
    conflict: tuple[LockedSchema, SchemaPublished, int] | None = None
    for record in on_log:
        try:
            published = decode_at(record, SchemaPublished)
        except DecodeError as error:
            log.error("no schema can be read here", extra={"fields": {"reason": error}})
            continue
        highest = max(highest, published.schema_id)
        schema = by_id.get(published.schema_id)
        if schema is None:
            continue
        if _told_by(schema) != _told(published):
            conflict = conflict or (schema, published, record.offset)
        found.add(published.schema_id)
    if conflict is not None:
        raise _refusal(*conflict, topic=topic, free_id=highest + 1)
    return [schema for schema in locked if schema.id not in found]


async def publish_schemas(
    settings: KafkaSettings, *, locked: Sequence[LockedSchema] | None = None, check: bool = False
) -> list[int]:
    """Put these schemas (those of the lock file) on the log where they are missing, and return their ids.

    With `check` nothing is written. Raises SchemaConflict, and then nothing was; BusUnavailable.
    """
    topic = SCHEMAS.in_namespace(settings.namespace).name
    async with open_schema_topic(settings) as reader:
        records, _ = await reader.read(0)
    missing = unpublished(locked_schemas() if locked is None else locked, records, topic=topic)
    if missing and not check:
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
                for schema in missing
            ]
            await producer.acknowledged(sent, timeout_s=_ACK_WITHIN_S)
    return [schema.id for schema in missing]


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
    return schema.record, schema.fingerprint, schema.subject, schema.version, schema.sha256


def _told(published: SchemaPublished) -> tuple[object, ...]:
    p = published
    try:
        digest = text_digest(json.loads(p.definition))
    except ValueError:
        digest = "not JSON"
    return p.record, p.fingerprint, p.subject, p.version, digest


def _refusal(
    schema: LockedSchema, published: SchemaPublished, offset: int, *, topic: str, free_id: int
) -> SchemaConflict:
    here = f"{schema.record} version {schema.version} (fingerprint {schema.fingerprint})"
    there = f"{published.record} version {published.version} (fingerprint {published.fingerprint})"
    if here == there:
        there = "the same with another subject, or another text of docs and defaults,"
    return SchemaConflict(
        f"schema id {schema.id} is {here} in {LOCK_FILE} and {there} at offset {offset} of {topic}: two branches used "
        f"one id. No schema was published. What is on the log stays; give the schema of this branch a free id, "
        f"{free_id} or higher, before anything is written with it"
    )
