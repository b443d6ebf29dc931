"""A writer that is newer than this code: its schema has one more field, and an id that is not in the lock file.

On request its enums have more symbols too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import fastavro

from schemas.codec import Codec
from schemas.facts import Record, SchemaPublished
from schemas.frame import fingerprint
from schemas.ids import schema_id_event
from schemas.lockfile import latest, locked_schemas
from tests.factories import NOON


class NewerWriter:
    """Writes records like `like`; `published` is what its operator put on the schemas topic before it started.

    `symbols` are added to enums, by the enum's name.
    """

    def __init__(self, like: Record, *, schema_id: int = 4711, symbols: Mapping[str, str] | None = None) -> None:
        self._schema_id = schema_id
        definition = latest(like.SCHEMA).definition()
        field = {"name": "added_later", "type": ["null", "string"], "default": None, "doc": "Nobody here knows it."}
        definition["fields"].append(field)
        for name, symbol in (symbols or {}).items():
            _enum(definition, name)["symbols"].append(symbol)
        self._schema = fastavro.parse_schema(definition, named_schemas={})
        self.published = SchemaPublished(
            event_id=schema_id_event(schema_id),
            occurred_at=NOON,
            schema_id=schema_id,
            subject=latest(like.SCHEMA).subject,
            version=99,
            record=like.SCHEMA,
            fingerprint=fingerprint(definition),
            definition=json.dumps(definition),
        )

    def write(self, framed: bytes, **changes: Any) -> bytes:
        """The record in these bytes of today's writer, as this one writes it; `changes` may be no value of today's."""
        written_with = fastavro.parse_schema(latest(self.published.record).definition(), named_schemas={})
        datum = fastavro.schemaless_reader(BytesIO(framed[5:]), written_with, None)
        assert isinstance(datum, dict)
        out = BytesIO()
        out.write(struct.pack(">bI", 0, self._schema_id))
        fastavro.schemaless_writer(out, self._schema, datum | {"added_later": "news"} | changes)
        return out.getvalue()


def _enum(schema: Any, name: str) -> Any:
    """The definition of the enum of this name, wherever it is inside."""
    if isinstance(schema, dict) and schema.get("type") == "enum" and schema.get("name") == name:
        return schema
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return next((found for part in parts if (found := _enum(part, name)) is not None), None)


def forgetful() -> Codec:
    """A codec of a test's own: what it learns, no other test knows."""
    return Codec(locked_schemas())
