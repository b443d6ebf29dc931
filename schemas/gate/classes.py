"""Do the classes the code works with say the same as the newest schemas? If not, the line that mends it."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from schemas.gate.findings import Finding
from schemas.outline import Field, Node
from schemas.ranges import INT_MAX, LONG_MAX, Moments, Range, Text

_PLAIN: dict[Any, tuple[str, str]] = {
    str: ("string", ""),
    bytes: ("bytes", ""),
    bool: ("boolean", ""),
    UUID: ("string", "uuid"),
    datetime: ("long", "timestamp-micros"),
}
_HINTS = {kind: hint.__name__ for hint, kind in _PLAIN.items()} | {("int", ""): "Count", ("long", ""): "Quantity"}
_MOST = {"int": INT_MAX, "long": LONG_MAX}


def class_findings(record: str, cls: type[Any] | None, newest: Node) -> tuple[Finding, ...]:
    """Where the class of a record, and those inside it, differ from its newest schema, in fields or in their types."""
    if cls is None:
        problem = "No class has this record as its SCHEMA, so the code can neither write nor read it."
        remedy = "add a frozen dataclass to schemas/records.py or schemas/facts.py and name it in RECORD_TYPES."
        return (Finding(record=record, path="", rule="typed-class", problem=problem, remedy=remedy),)
    return tuple(_record(record, "", cls, newest))


def _record(record: str, path: str, cls: type[Any], node: Node) -> Iterator[Finding]:
    hints = get_type_hints(cls, include_extras=True)
    has = {f.name: f for f in fields(cls)}
    for field in node.fields:
        at = f"{path}.{field.name}" if path else field.name
        if field.name not in has:
            problem = f"The class {cls.__name__} lacks the field."
            remedy = f"add to {cls.__name__} in {_file(cls)}:  {_line(field)}"
            yield Finding(record=record, path=at, rule="typed-class", problem=problem, remedy=remedy)
            continue
        mine = has[field.name]
        if field.has_default and mine.default is MISSING and mine.default_factory is MISSING:
            problem = f"The schema has a default for the field and the class {cls.__name__} has none."
            remedy = f"write in {_file(cls)}:  {_line(field)}"
            yield Finding(record=record, path=at, rule="typed-class", problem=problem, remedy=remedy)
        yield from _type(record, at, hints[field.name], field.type)
    for name in sorted(has.keys() - {f.name for f in node.fields}):
        problem = f"The class {cls.__name__} has the field and the newest schema has not, so it is never written."
        remedy = f"take it out of {_file(cls)}, or publish it: inferlog schemas add."
        at = f"{path}.{name}" if path else name
        yield Finding(record=record, path=at, rule="typed-class", problem=problem, remedy=remedy)


def _type(record: str, path: str, hint: Any, node: Node) -> Iterator[Finding]:
    origin = get_origin(hint)
    inner = node.nullable
    if origin in (Union, types.UnionType):
        given = [a for a in get_args(hint) if a is not type(None)]
        if inner is not None and len(given) == 1 and type(None) in get_args(hint):
            yield from _type(record, path, given[0], inner)
            return
    elif inner is None:
        if origin is tuple and node.kind == "array" and node.items is not None:
            yield from _type(record, path + "[]", get_args(hint)[0], node.items)
            return
        if origin is not None and node.kind == "map" and node.items is not None and issubclass(origin, Mapping):
            yield from _type(record, path + "{}", get_args(hint)[1], node.items)
            return
        if is_dataclass(hint) and isinstance(hint, type) and node.kind == "record":
            yield from _record(record, path, hint, node)
            return
        if _agrees(hint, node):
            return
    problem = f"The class has {_words(hint)} and the schema {node.kind if inner is None else f'null or {inner.kind}'}."
    remedy = f"make the class fit the schema, which is published:  {_hint(node)}"
    yield Finding(record=record, path=path, rule="typed-class", problem=problem, remedy=remedy)


def _agrees(hint: Any, node: Node) -> bool:
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)
        if isinstance(bounds, (Moments, Text)):
            return _PLAIN.get(kind) == (node.kind, node.logical)
        if kind is not int or node.logical or node.kind not in _MOST or not isinstance(bounds, Range):
            return False
        return -_MOST[node.kind] - 1 <= bounds.low and bounds.high <= _MOST[node.kind]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return node.kind == "enum" and tuple(one.value for one in hint) == node.symbols
    return _PLAIN.get(hint) == (node.kind, node.logical)


def _line(field: Field) -> str:
    default = f" = {_literal(field.type, field.default)}" if field.has_default else ""
    return f"{field.name}: {_hint(field.type)}{default}"


def _literal(node: Node, value: Any) -> str:
    """A default as the class has it, in the house format, which prefers double quotes."""
    if node.kind == "enum":
        return f"{node.short_name}.{value}"
    if isinstance(value, list):
        return f"({''.join(_literal(node.items, one) + ', ' for one in value).rstrip()})" if node.items else "()"
    if isinstance(value, dict):
        return "field(default_factory=dict)" if not value else f"field(default_factory=lambda: {value!r})"
    if not isinstance(value, str):
        return repr(value)
    shown = repr(value.encode("latin-1") if node.kind == "bytes" else value)
    return shown if '"' in value or "'" in value else shown.replace("'", '"')


def _hint(node: Node) -> str:
    if node.nullable is not None:
        return f"{_hint(node.nullable)} | None"
    if node.kind == "array" and node.items is not None:
        return f"tuple[{_hint(node.items)}, ...]"
    if node.kind == "map" and node.items is not None:
        return f"Mapping[str, {_hint(node.items)}]"
    if node.kind == "enum":
        return f"{node.short_name} (an Enum with {', '.join(node.symbols)})"
    return node.short_name or _HINTS.get((node.kind, node.logical), node.kind)


def _words(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        words: str = get_args(hint)[1].words
        return words
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"{hint.__name__} with {', '.join(str(one.value) for one in hint)}"
    return getattr(hint, "__name__", None) or str(hint)


def _file(cls: type[Any]) -> str:
    return cls.__module__.replace(".", "/") + ".py"
