"""What a schema of ours looks like, whatever came before it: names, documentation, types, defaults.

Avro itself would take all that is refused here. Each rule keeps a promise to readers: no rounding, no guessing of
units, no symbol or field that an old reader stumbles over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from schemas.gate.findings import Finding
from schemas.outline import Absent, Field, Node, walk
from schemas.ranges import INT_MAX, LONG_MAX

_NAMESPACE = re.compile(r"inferlog\.[a-z][a-z0-9_]*\.v[1-9][0-9]*")
_PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_SYMBOL = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_LOGICAL = {("string", "uuid"), ("long", "timestamp-micros")}
_ENVELOPE = {
    "event_id": (
        Node(kind="string", logical="uuid"),
        '{"name": "event_id", "type": {"type": "string", "logicalType": "uuid"}, "doc": "..."}',
    ),
    "occurred_at": (
        Node(kind="long", logical="timestamp-micros"),
        '{"name": "occurred_at", "type": {"type": "long", "logicalType": "timestamp-micros"}, "doc": "..."}',
    ),
}


def form_findings(schema: Node) -> tuple[Finding, ...]:
    """Where a schema is not of our form; empty when it is."""
    if schema.kind != "record":
        what = Finding(
            record=schema.name or schema.kind,
            path="",
            rule="record",
            problem=f"The schema is of type {schema.kind}, and what is written to a topic is always a record.",
            remedy='wrap it: {"type": "record", "name": ..., "namespace": "inferlog.<domain>.v1", "fields": [...]}.',
        )
        return (what,)
    found = list(_envelope(schema))
    for path, node in walk(schema):
        for rule in (_names, _twice, _documented, _type, _enum, _aliases):
            found += rule(schema.name, path, node)
        for field in node.fields:
            found += _field(schema.name, f"{path}.{field.name}" if path else field.name, field)
    found += _unions_without_field(schema)
    return tuple(dict.fromkeys(found))


def fits(value: object, node: Node) -> bool:
    """Whether a default, as JSON has it, is a value of the type. A union's default is of its first branch."""
    if node.kind == "union":
        return bool(node.branches) and fits(value, node.branches[0])
    if node.kind == "record":
        return isinstance(value, dict) and all(
            fits(value[f.name], f.type) if f.name in value else f.has_default for f in node.fields
        )
    if node.kind in ("array", "map") and node.items is not None:
        inner = node.items
        if node.kind == "array":
            return isinstance(value, list) and all(fits(one, inner) for one in value)
        return isinstance(value, dict) and all(fits(one, inner) for one in value.values())
    if node.kind == "enum":
        return value in node.symbols
    return _PRIMITIVE[node.kind](value) if node.kind in _PRIMITIVE else False


def _integer(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -most - 1 <= value <= most


_PRIMITIVE: dict[str, Callable[[object], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "int": lambda v: _integer(v, INT_MAX),
    "long": lambda v: _integer(v, LONG_MAX),
    "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "double": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "bytes": lambda v: isinstance(v, str) and all(ord(c) < 256 for c in v),
}


def _envelope(schema: Node) -> Iterator[Finding]:
    present = {f.name: f.type for f in schema.fields}
    for name, (expected, remedy) in _ENVELOPE.items():
        if present.get(name) != expected:
            has = "has no" if name not in present else "has another type for"
            problem = f"Every record says what it is and when it happened, and this one {has} {name}."
            yield Finding(record=schema.name, path=name, rule="envelope", problem=problem, remedy=f"add {remedy}.")


def _names(record: str, path: str, node: Node) -> Iterator[Finding]:
    if not node.name:
        return
    namespace = node.name.rpartition(".")[0]
    if not _NAMESPACE.fullmatch(namespace):
        problem = f"The namespace of {node.short_name} is '{namespace}'."
        remedy = "write inferlog.<domain>.v1, as in inferlog.usage.v1; the number changes only with a new topic."
        yield Finding(record=record, path=path, rule="names", problem=problem, remedy=remedy)
    if not _PASCAL.fullmatch(node.short_name):
        problem = f"The type's name is '{node.short_name}', and names of types are in PascalCase."
        remedy = "name a record after the fact in the past tense: UsageRecorded, KeyChanged."
        yield Finding(record=record, path=path, rule="names", problem=problem, remedy=remedy)


def _twice(record: str, path: str, node: Node) -> Iterator[Finding]:
    what = "symbol" if node.kind == "enum" else "field"
    names = node.symbols if node.kind == "enum" else tuple(f.name for f in node.fields)
    for name in dict.fromkeys(n for n in names if names.count(n) > 1):
        problem = f"{node.short_name} has the {what} {name} twice, and a name means one thing."
        at = f"{path}.{name}" if path else name
        remedy = f"take one of them out, or give it a name that no {what} of {node.short_name} has had."
        yield Finding(record=record, path=at, rule="names", problem=problem, remedy=remedy)


def _documented(record: str, path: str, node: Node) -> Iterator[Finding]:
    if node.name and not node.doc.strip():
        problem = f"{node.short_name} has no doc, so nobody can tell what it says without asking us."
        remedy = f'add "doc" to the {node.kind}: what is true once it is written, in one or two sentences.'
        yield Finding(record=record, path=path, rule="doc", problem=problem, remedy=remedy)


def _type(record: str, path: str, node: Node) -> Iterator[Finding]:
    if node.kind in ("float", "double"):
        problem = f"{node.kind} cannot hold most decimal fractions, and its sums depend on the order of adding."
        remedy = "use long in the smallest unit and put the unit into the name: amount_micros, run_us, size_bytes."
        yield Finding(record=record, path=path, rule="no-float", problem=problem, remedy=remedy)
    elif node.kind == "fixed":
        problem = "fixed can never change its size, and libraries differ in what they make of it."
        remedy = "use bytes, or string for a digest in hex."
        yield Finding(record=record, path=path, rule="types", problem=problem, remedy=remedy)
    elif node.logical and (node.kind, node.logical) not in _LOGICAL:
        if "time" in node.logical or node.logical in ("date", "duration"):
            rule = "timestamp-micros"
            remedy = (
                'use {"type": "long", "logicalType": "timestamp-micros"} for a moment, and long with the unit in the '
                "name (queue_us) for a length of time."
            )
        elif node.logical == "uuid":
            rule, remedy = "types", 'use {"type": "string", "logicalType": "uuid"}, which every library reads.'
        else:
            rule, remedy = "types", "use long in the smallest unit (amount_micros), or string."
        problem = f"{node.logical} on {node.kind} is read differently, or not at all, by common Avro libraries."
        yield Finding(record=record, path=path, rule=rule, problem=problem, remedy=remedy)


def _enum(record: str, path: str, node: Node) -> Iterator[Finding]:
    if node.kind != "enum":
        return
    if node.symbols[:1] != ("UNKNOWN",) or node.default != "UNKNOWN":
        problem = "An old reader meets symbols that did not exist when it was written, and must have one for them."
        remedy = f'start {node.short_name} with the symbol UNKNOWN and add "default": "UNKNOWN" beside "symbols".'
        yield Finding(record=record, path=path, rule="enum-unknown", problem=problem, remedy=remedy)
    for symbol in node.symbols:
        if not _SYMBOL.fullmatch(symbol):
            remedy = "write symbols in capitals, as in NOT_FOUND."
            problem = f"The symbol '{symbol}' is not in capitals."
            yield Finding(record=record, path=path, rule="names", problem=problem, remedy=remedy)


def _aliases(record: str, path: str, node: Node) -> Iterator[Finding]:
    names = [(f"{path}.{f.name}" if path else f.name, f.aliases) for f in node.fields if f.aliases]
    if node.aliases:
        names.append((path, node.aliases))
    for at, aliases in names:
        problem = f"An alias ({', '.join(aliases)}) is followed by new readers only; old ones lose the value."
        remedy = "keep the old name. Names cannot be changed once published."
        yield Finding(record=record, path=at, rule="rename", problem=problem, remedy=remedy)


def _field(record: str, path: str, field: Field) -> Iterator[Finding]:
    if not _SNAKE.fullmatch(field.name):
        problem = f"The field's name '{field.name}' is not in snake_case."
        remedy = "write it in lower case with underscores, as in customer_id, with the unit at the end."
        yield Finding(record=record, path=path, rule="names", problem=problem, remedy=remedy)
    if not field.doc.strip():
        problem = "The field has no doc, so an analyst can only guess its unit, its range and what null means."
        remedy = 'add "doc" to the field: its unit, its range, and what null means if it may be null.'
        yield Finding(record=record, path=path, rule="doc", problem=problem, remedy=remedy)
    value = field.type.nullable or field.type
    if field.name.endswith("_at") and (value.kind, value.logical) != ("long", "timestamp-micros"):
        problem = f"A field named *_at is a moment, and this one is {value.logical or value.kind}."
        remedy = 'use {"type": "long", "logicalType": "timestamp-micros"}, or another name.'
        yield Finding(record=record, path=path, rule="timestamp-micros", problem=problem, remedy=remedy)
    if field.type.kind == "union" and (field.type.nullable is None or field.default is not None):
        problem = "The field is a union, and not one of null (first) and one type with null as its default."
        remedy = '"type": ["null", <type>], "default": null. For anything else use two fields.'
        yield Finding(record=record, path=path, rule="null-first", problem=problem, remedy=remedy)
    elif field.default is not Absent.DEFAULT and not fits(field.default, field.type):
        problem = f"The default {field.default!r} is no {field.type.kind}."
        remedy = f"give a default that is a value of {field.type.logical or field.type.kind}."
        yield Finding(record=record, path=path, rule="default-fits", problem=problem, remedy=remedy)


def _unions_without_field(schema: Node) -> Iterator[Finding]:
    for path, node in walk(schema):
        if (node.items is not None and node.items.kind == "union") or any(b.kind == "union" for b in node.branches):
            problem = "A union inside an array, a map or another union can have no default."
            remedy = "leave out what is absent, or put the value into a record with a nullable field."
            yield Finding(record=schema.name, path=path, rule="null-first", problem=problem, remedy=remedy)
