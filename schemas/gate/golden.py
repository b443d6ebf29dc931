"""Golden records: one real record per published version, in hex and as JSON, that every other version must read.

They are the worked examples of `docs/events.md` as well. The next version's is made from the one before it and sample
values for what is new.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid5

from schemas.frame import header
from schemas.gate.evolution import Definition, Undecodable, read, write
from schemas.outline import Absent, Node, outline
from schemas.plain import to_plain

_NOON = datetime(2026, 3, 2, 12, 0, tzinfo=timezone.utc)
_ABSENT: Any = Absent.DEFAULT


class GoldenError(ValueError):
    """A golden file that is not what its schema writes; the message says what was found."""


def golden_text(schema_id: int, definition: Definition, previous: Mapping[str, Any] | None = None) -> str:
    """The golden file of a version: the previous version's record, in plain form, with samples for new fields.

    Raises GoldenError when a value there is no value of its field.
    """
    try:
        datum = datum_of(outline(definition), _ABSENT if previous is None else previous, name="record")
        body = write(definition, datum)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise GoldenError(f"a value is not one of its field: {type(error).__name__}: {error}") from error
    document = {
        "schema_id": schema_id,
        "hex": (header(schema_id) + body).hex(),
        "record": to_plain(read(body, writer=definition)),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def golden_body(document: Mapping[str, Any], schema_id: int, definition: Definition) -> bytes:
    """The Avro body of a golden file, checked against its JSON form. Raises GoldenError."""
    try:
        value = bytes.fromhex(document["hex"])
        stated, record = document["schema_id"], document["record"]
    except (KeyError, TypeError, ValueError) as error:
        raise GoldenError(f"it needs schema_id, hex and record ({type(error).__name__}: {error})") from error
    frame = header(schema_id)
    if stated != schema_id or value[: len(frame)] != frame:
        raise GoldenError(f"schema_id is {stated} and the frame {value[: len(frame)].hex()}, expected {frame.hex()}")
    body = value[len(frame) :]
    try:
        found = to_plain(read(body, writer=definition))
    except Undecodable as error:
        raise GoldenError(f"its bytes are no such record: {error}") from error
    if found != record:
        differing = sorted(k for k in {*found, *record} if found.get(k, _ABSENT) != record.get(k, _ABSENT))
        raise GoldenError(f"its bytes and its JSON differ in {', '.join(differing)}")
    return body


def datum_of(node: Node, plain: Any, *, name: str) -> Any:
    """A value of the type from its plain form (`schemas.plain`); what is not there is made up, by type and name."""
    if node.kind == "record":
        known = plain if isinstance(plain, Mapping) else {}
        return {f.name: datum_of(f.type, known.get(f.name, _ABSENT), name=f.name) for f in node.fields}
    if node.kind == "union":
        return None if plain is None or node.nullable is None else datum_of(node.nullable, plain, name=name)
    if plain is _ABSENT:
        return _sample(node, name)
    if node.items is not None:
        inner = node.items
        if isinstance(plain, Mapping):
            return {key: datum_of(inner, one, name=name) for key, one in plain.items()}
        return [datum_of(inner, one, name=name) for one in plain]
    if node.kind == "bytes":
        return b64decode(plain)
    if node.logical == "timestamp-micros":
        return datetime.strptime(plain, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    return UUID(plain) if node.logical == "uuid" else plain


def _sample(node: Node, name: str) -> Any:
    if node.logical == "uuid":
        return uuid5(UUID(int=0), name)
    if node.logical == "timestamp-micros":
        return _NOON + timedelta(seconds=1)
    if node.items is not None:
        one = datum_of(node.items, _ABSENT, name=name)
        return [one] if node.kind == "array" else {"items": one}
    if node.kind == "enum":
        return node.symbols[-1]
    if name.endswith("sha256") or name == "version":
        return hashlib.sha256(name.encode()).hexdigest() if node.kind == "string" else 1
    samples: dict[str, Any] = {"boolean": True, "int": 1, "long": 1, "bytes": b"\x01", "string": f"a {name}"}
    return samples[node.kind]
