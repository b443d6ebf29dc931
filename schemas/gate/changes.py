"""What may differ between two versions of a record, so that either one's reader understands either one's bytes.

Old readers go on running and old bytes are kept for years, so every rule holds in both directions and between any
two versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from schemas.gate.findings import Finding
from schemas.outline import Field, Node


def change_findings(older: Node, newer: Node, *, adjacent: bool) -> tuple[Finding, ...]:
    """Where `newer` breaks a rule with regard to `older`; empty when both may live side by side.

    `adjacent` versions follow each other directly; between others a field may well have gone and another come.
    """
    return tuple(_Comparison(newer.name, adjacent).types("", older, newer))


class _Comparison:
    def __init__(self, record: str, adjacent: bool) -> None:
        self._record = record
        self._adjacent = adjacent

    def _finding(self, path: str, rule: str, problem: str, remedy: str) -> Finding:
        return Finding(record=self._record, path=path, rule=rule, problem=problem, remedy=remedy)

    def types(self, path: str, older: Node, newer: Node) -> Iterator[Finding]:
        was, now = describe(older), describe(newer)
        if was != now:
            yield self._type(path, was, now)
        elif older.name != newer.name:
            problem = f"The type of this field was called {older.name} and is now called {newer.name}."
            remedy = f"keep the name {older.name}; readers match records and enums by name."
            yield self._finding(path, "rename", problem, remedy)
        elif older.kind == "enum":
            yield from self._symbols(path, older, newer)
        elif older.kind == "record":
            yield from self._fields(path, older, newer)
        else:
            if older.items is not None and newer.items is not None:
                yield from self.types(path + ("[]" if older.kind == "array" else "{}"), older.items, newer.items)
            for one, other in zip(older.branches, newer.branches, strict=True):
                yield from self.types(path, one, other)

    def _type(self, path: str, was: str, now: str) -> Finding:
        problem = f"The type was {was} and is now {now}."
        if (was, now) == ("int", "long"):
            problem += " A new reader can widen an old int, but an old reader cannot take in a new long."
        elif now == f"null or {was}":
            problem += " An old reader has no place for null."
        name = path.rpartition(".")[2] or "the field"
        remedy = (
            f"leave {name} as it is and add a field with another name, the new type and a default; "
            "write both until no reader needs the old one."
        )
        return self._finding(path, "type-change", problem, remedy)

    def _symbols(self, path: str, older: Node, newer: Node) -> Iterator[Finding]:
        if older.default != newer.default:
            problem = f"The enum's default was {older.default} and is now {newer.default}."
            remedy = f"keep {older.default}; unknown symbols must read the same everywhere."
            yield self._finding(path, "default-change", problem, remedy)
        if newer.symbols[: len(older.symbols)] == older.symbols:
            return
        gone = [s for s in older.symbols if s not in newer.symbols]
        if gone:
            problem = f"The symbol {gone[0]} was removed, and records that hold it would read as {newer.default}."
        else:
            problem = f"The symbols were {', '.join(older.symbols)} and are now {', '.join(newer.symbols)}."
        remedy = (
            f"keep {', '.join(older.symbols)} in this order and add new symbols after them; the bytes hold a symbol's "
            "place in the list, and some readers look no further."
        )
        yield self._finding(path, "enum-append", problem, remedy)

    def _fields(self, path: str, older: Node, newer: Node) -> Iterator[Finding]:
        was = {f.name: f for f in older.fields}
        now = {f.name: f for f in newer.fields}
        gone = [f for f in older.fields if f.name not in now]
        come = [f for f in newer.fields if f.name not in was]
        for old, new in _renamed(gone, come):
            if (self._adjacent or not (old.has_default and new.has_default)) and old in gone and new in come:
                gone.remove(old)
                come.remove(new)
                yield self._rename(_join(path, old.name), old, new)
        for field in gone:
            if not field.has_default:
                problem = f"The field was removed. It has no default, so readers of {older.short_name} need it."
                remedy = "keep the field and go on writing it; say in its doc that it is no longer of use."
                yield self._finding(_join(path, field.name), "field-removed", problem, remedy)
        for field in come:
            if not field.has_default:
                problem = "The field is new and has no default, so it cannot be read from records written before."
                remedy = 'give it a default: "type": ["null", <type>], "default": null, and say in doc what null means.'
                yield self._finding(_join(path, field.name), "field-added", problem, remedy)
        for field in older.fields:
            if field.name in now:
                yield from self._default(_join(path, field.name), field, now[field.name])
                yield from self.types(_join(path, field.name), field.type, now[field.name].type)

    def _rename(self, path: str, old: Field, new: Field) -> Finding:
        problem = f"{old.name} is gone and {new.name} has come with the same type: this looks like another name for it."
        remedy = (
            f"keep the name {old.name}. To readers a new name is one field removed and another added, and the value is "
            "lost; an alias helps new readers only. If they are two different things, publish them as two versions."
        )
        return self._finding(path, "rename", problem, remedy)

    def _default(self, path: str, old: Field, new: Field) -> Iterator[Finding]:
        if not old.has_default or (new.has_default and _same(old.default, new.default)):
            return
        shown = repr(new.default) if new.has_default else "none"
        problem = f"The default was {old.default!r} and is now {shown}."
        remedy = f"keep {old.default!r}: what records without the field mean, they must mean to every reader."
        yield self._finding(path, "default-change", problem, remedy)


def describe(node: Node) -> str:
    """A type in words, without what is inside arrays, maps, records and enums."""
    if node.kind == "union":
        parts = (f"({describe(b)})" if b.kind == "union" else describe(b) for b in node.branches)
        return " or ".join(parts)
    return f"{node.kind} ({node.logical})" if node.logical else node.kind


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _renamed(gone: list[Field], come: list[Field]) -> list[tuple[Field, Field]]:
    """Pairs of a field that went and one that came which are likely the same thing: an alias says so, or both are the
    only ones of their type.
    """
    pairs = [(old, new) for old in gone for new in come if old.name in new.aliases]
    for old in gone:
        alike = [f for f in gone if _bare(f.type) == _bare(old.type)]
        new = [f for f in come if _bare(f.type) == _bare(old.type)]
        if len(alike) == len(new) == 1:
            pairs.append((old, new[0]))
    return pairs


def _bare(node: Node) -> Node:
    return replace(
        node,
        doc="",
        fields=tuple(replace(f, doc="", type=_bare(f.type)) for f in node.fields),
        items=None if node.items is None else _bare(node.items),
        branches=tuple(map(_bare, node.branches)),
    )
