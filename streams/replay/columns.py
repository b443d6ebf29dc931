"""The columns of a table of records, read off a record's Avro schema, and how a record's values are made to fit them.

Every record gets four columns more, `PLACE`: where on the log it lies and when it was written there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from schemas.lockfile import latest

Kind = Literal["text", "uuid", "time", "int", "long", "bytes", "enum", "map", "list", "record"]
Convert = Callable[[Any], Any]

#: Avro's fields for a record's place; also the schema of the four columns.
PLACE: tuple[dict[str, Any], ...] = (
    {"name": "_topic", "type": "string", "doc": "Topic the record was read from."},
    {"name": "_partition", "type": "int", "doc": "Partition it lies on."},
    {"name": "_offset", "type": "long", "doc": "Offset it has there; with topic and partition it names the record."},
    {
        "name": "_timestamp",
        "type": {"type": "long", "logicalType": "timestamp-micros"},
        "doc": "When it was written to the log, UTC, to the millisecond.",
    },
)

_NAMED: dict[str, Kind] = {"string": "text", "int": "int", "long": "long", "bytes": "bytes"}
_LOGICAL: dict[tuple[str, str], Kind] = {("string", "uuid"): "uuid", ("long", "timestamp-micros"): "time"}


class UnknownType(TypeError):
    """A schema has a type that no column is known for; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One field: `items` is what a list or a map holds, `fields` what a record holds."""

    name: str
    doc: str
    kind: Kind
    nullable: bool = False
    items: Column | None = None
    fields: tuple[Column, ...] = ()


def exported_schema(record: str) -> dict[str, Any]:
    """The newest published schema of a record, with the four fields of `PLACE` after its own.

    The record keeps its name, so that a reader with the published schema reads it and passes over the place.
    """
    definition = latest(record).definition()
    return {**definition, "fields": [*definition["fields"], *PLACE]}


def columns_of(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of a record's schema, in order. Raises UnknownType."""
    return _Namespace().fields(schema, path=schema["name"])


class _Namespace:
    """Reads schemas; remembers the types they name, which later fields may refer to by name."""

    def __init__(self) -> None:
        self._types: dict[str, Mapping[str, Any]] = {}

    def fields(self, schema: Mapping[str, Any], *, path: str) -> tuple[Column, ...]:
        return tuple(
            self.column(f["name"], f["type"], doc=f.get("doc", ""), path=f"{path}.{f['name']}")
            for f in schema["fields"]
        )

    def column(self, name: str, schema: Any, *, path: str, doc: str = "") -> Column:
        nullable = isinstance(schema, list) and "null" in schema
        if isinstance(schema, list):
            inner = [one for one in schema if one != "null"]
            if len(inner) != 1:
                raise UnknownType(f"{path}: a union of {len(inner)} types has no column")
            schema = inner[0]
        if isinstance(schema, str) and schema in self._types:
            schema = self._types[schema]
        if isinstance(schema, str):
            schema = {"type": schema}
        kind: str = schema["type"]
        if kind in ("record", "enum"):
            self._types[schema["name"]] = schema
        logical = _LOGICAL.get((kind, schema.get("logicalType", "")))
        if kind == "record":
            fields = self.fields(schema, path=path)
            return Column(name=name, doc=doc, kind="record", nullable=nullable, fields=fields)
        if kind in ("array", "map"):
            items = self.column("item", schema["items" if kind == "array" else "values"], path=f"{path}[]")
            return Column(name=name, doc=doc, kind="list" if kind == "array" else "map", nullable=nullable, items=items)
        found = "enum" if kind == "enum" else logical or _NAMED.get(kind)
        if found is None or (logical is None and "logicalType" in schema):
            raise UnknownType(f"{path}: Avro type {schema} has no column; add it to streams/replay/columns.py")
        return Column(name=name, doc=doc, kind=found, nullable=nullable)


def converter(column: Column, leaves: Mapping[Kind, Convert]) -> Convert | None:
    """How a typed record's value becomes a column's: `leaves` says it for single values, and for a map as a whole.

    Records become dicts, tuples lists, enums their symbols. None when the value is right as it is.
    """
    convert = _converter(column, leaves)
    if convert is None or not column.nullable:
        return convert
    return lambda value: None if value is None else convert(value)


def _converter(column: Column, leaves: Mapping[Kind, Convert]) -> Convert | None:
    if column.kind == "record":
        names = tuple(f.name for f in column.fields)
        parts = [(name, attrgetter(name), converter(f, leaves)) for name, f in zip(names, column.fields, strict=True)]
        return lambda value: {n: convert(get(value)) if convert else get(value) for n, get, convert in parts}
    if column.kind == "list" and column.items is not None:
        one = converter(column.items, leaves)
        return (lambda values: [one(v) for v in values]) if one else list
    if column.kind == "enum":
        return attrgetter("value")
    return leaves.get(column.kind)
