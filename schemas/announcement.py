"""May a schema that somebody announced on the log be learnt? It may come from a newer release, and from anybody else.

What is learnt reads as ours does: the fields that both have are of the same types, and no bytes make the reader take
more steps than there are bytes, times the depth. Everything else is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.document import NoDocument, parsed
from schemas.facts import SchemaPublished
from schemas.frame import NoSchema, fingerprint
from schemas.lockfile import LockedSchema, LockfileError, text_digest, versions_of
from schemas.outline import Node, SchemaError, children, outline, walk
from schemas.topics import TOPIC_NAME

#: The most a schema's text may be. Ours are below 5 KB; the gate publishes none above it.
MAX_TEXT_BYTES = 32 * 1024
_LONGEST_NAME = 255
_MAX_FIXED_BYTES = 2**20
_REASON_CHARS = 300

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FULL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")
_OUR_RECORD = re.compile(r"inferlog\.[a-z][a-z0-9_]*\.v[1-9][0-9]*\.[A-Z][A-Za-z0-9]*")
_OUR_SUBJECT = re.compile(TOPIC_NAME + "-value")
#: What fastavro turns into UUIDs and datetimes. Any other logical type is left out, as Avro says of unknown ones.
_LOGICAL = {("string", "uuid"), ("long", "timestamp-micros")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A schema that may be learnt: `definition` has only what reading needs, `digest` stands for the whole text."""

    definition: dict[str, Any]
    digest: str


def announced(published: SchemaPublished, locked: Sequence[LockedSchema]) -> Announced:
    """The schema of an id that is new here. `locked` are those of this release.

    Raises LockfileError, naming the reason, for one that no release of this program can have published.
    """
    try:
        _require_place(published, locked)
        definition = _document(published)
        tree = outline(definition)
        if tree.kind != "record" or tree.name != published.record:
            defines = tree.name or tree.kind
            raise SchemaError(f"it is announced for {published.record} and defines {defines}")
        require_bounded(tree)
        if ours := versions_of(published.record, locked):
            _require_same("", tree, outline(ours[-1].definition()))
        if fingerprint(definition) != published.fingerprint:
            raise SchemaError("its text is not what its fingerprint says")
        return Announced(definition=_bare(tree, set()), digest=text_digest(definition))
    except (NoDocument, NoSchema, SchemaError) as error:
        raise _refusal(published, str(error)) from None


def digest_of(published: SchemaPublished) -> str:
    """What stands for the text of a schema whose id is known. Raises LockfileError for text that is none."""
    try:
        return text_digest(_document(published))
    except (NoDocument, SchemaError) as error:
        raise _refusal(published, str(error)) from None


def _document(published: SchemaPublished) -> dict[str, Any]:
    size_bytes = len(published.definition.encode())
    if size_bytes > MAX_TEXT_BYTES:
        raise SchemaError(f"its text has {size_bytes} bytes, expected at most {MAX_TEXT_BYTES}")
    found = parsed(published.definition)
    if not isinstance(found, dict):
        raise SchemaError(f"it defines a {'union' if isinstance(found, list) else 'type'}, expected a record")
    return found


def _refusal(published: SchemaPublished, reason: str) -> LockfileError:
    return LockfileError(f"schema id {published.schema_id} on the log is not taken: {reason[:_REASON_CHARS]}")


def _require_place(published: SchemaPublished, locked: Sequence[LockedSchema]) -> None:
    """A record of ours is on its own subject; one that is new here is named like ours, and on a subject like ours."""
    if ours := versions_of(published.record, locked):
        if published.subject != ours[-1].subject:
            raise SchemaError(f"{published.record} is of subject {ours[-1].subject}, found '{published.subject[:100]}'")
        return
    taken = next((s.record for s in locked if s.subject == published.subject), None)
    if taken is not None:
        raise SchemaError(f"the subject {published.subject} is that of {taken}, found '{published.record[:100]}'")
    if not _OUR_RECORD.fullmatch(published.record) or len(published.record) > _LONGEST_NAME:
        raise SchemaError(f"expected a record inferlog.<domain>.v<n>.<Name>, found '{published.record[:100]}'")
    if not _OUR_SUBJECT.fullmatch(published.subject) or len(published.subject) > _LONGEST_NAME:
        raise SchemaError(f"expected a subject inference.<facts>.v<n>-value, found '{published.subject[:100]}'")


def require_bounded(tree: Node) -> None:
    """Raise SchemaError unless every type is named properly and takes at least a byte, so that no bytes stand for more
    values than they are."""
    for path, node in walk(tree):
        for what, names in _names(node):
            if bad := next((n for n in names if not _is_name(n, what)), None):
                raise SchemaError(f"{path or tree.name}: '{str(bad)[:80]}' is no name of a {what}")
            if len(set(names)) < len(names):
                raise SchemaError(f"{path or tree.name}: a {what} is there twice")
        if node.aliases or any(f.aliases for f in node.fields):
            raise SchemaError(f"{path or tree.name}: has aliases; names never change")
        if node.kind != "union" and any(one.kind == "null" for _, one in children("", node)):
            raise SchemaError(f"{path or tree.name}: null by itself takes no byte, and any number of it none")
        if node.kind == "enum" and not node.symbols:
            raise SchemaError(f"{path}: an enum without symbols")
        if node.kind == "record" and not node.fields:
            raise SchemaError(f"{path or tree.name}: a record without fields takes no byte, and any number of it none")
        if node.kind == "fixed" and not _fixed_size(node.size):
            raise SchemaError(f"{path}: expected a fixed of 1 to {_MAX_FIXED_BYTES} bytes, found {node.size!r}")
        if node.kind == "array" and node.items is not None and not _told_to_end(node.items):
            raise SchemaError(
                f"{path}[]: expected items with an integer, text, bytes, an enum, a union, an array or a map in them; "
                "a reader that passes over others does not see where the bytes end, and its number may be 2^60"
            )
        if node.kind == "union" and any(b.kind == "union" for b in node.branches):
            raise SchemaError(f"{path}: a union inside a union")
        if node.kind == "union" and not node.branches:
            raise SchemaError(f"{path}: a union without branches")


def _told_to_end(node: Node) -> bool:
    """Whether passing over a value of the type is refused where the bytes have ended: fastavro looks at the length of
    what begins with a number, and at nothing else."""
    if node.kind == "record":
        return any(_told_to_end(f.type) for f in node.fields)
    return node.kind not in ("boolean", "float", "double", "fixed", "null")


def _names(node: Node) -> Iterator[tuple[str, tuple[Any, ...]]]:
    if node.name:
        yield "type", (node.name,)
    yield "field", tuple(f.name for f in node.fields)
    yield "symbol", node.symbols


def _is_name(found: object, what: str) -> bool:
    if not isinstance(found, str) or len(found) > _LONGEST_NAME:
        return False
    return (_FULL_NAME if what == "type" else _WORD).fullmatch(found) is not None


def _fixed_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= _MAX_FIXED_BYTES


def _require_same(path: str, writer: Node, ours: Node) -> None:
    """What both have is of the same type, and what ours needs is there: the rules of change, as far as reading goes."""
    if (writer.kind, writer.logical, writer.name) != (ours.kind, ours.logical, ours.name):
        raise SchemaError(f"{path}: expected {_told(ours)}, found {_told(writer)}")
    if len(writer.branches) != len(ours.branches):
        raise SchemaError(f"{path}: expected a union of {len(ours.branches)} types, found {len(writer.branches)}")
    for theirs, mine in zip(writer.branches, ours.branches, strict=True):
        _require_same(path, theirs, mine)
    if writer.items is not None and ours.items is not None:
        _require_same(f"{path}[]", writer.items, ours.items)
    there = {f.name: f for f in writer.fields}
    for field in ours.fields:
        at = f"{path}.{field.name}" if path else field.name
        if field.name in there:
            _require_same(at, there[field.name].type, field.type)
        elif not field.has_default:
            raise SchemaError(f"it lacks {at}, which has no default")


def _told(node: Node) -> str:
    return " ".join(word for word in (node.kind, node.logical, node.name) if word)


def _bare(node: Node, told: set[str]) -> Any:
    """The type as JSON again, with full names and without what reading does not need."""
    if node.name in told:
        return node.name
    if node.name:
        told.add(node.name)
    if node.kind == "union":
        return [_bare(branch, told) for branch in node.branches]
    if node.items is not None:
        return {"type": node.kind, "items" if node.kind == "array" else "values": _bare(node.items, told)}
    if node.kind == "record":
        fields = [{"name": f.name, "type": _bare(f.type, told)} for f in node.fields]
        return {"type": "record", "name": node.name, "fields": fields}
    if node.kind == "enum":
        return {"type": "enum", "name": node.name, "symbols": list(node.symbols)}
    if node.kind == "fixed":
        return {"type": "fixed", "name": node.name, "size": node.size}
    logical = {"logicalType": node.logical} if (node.kind, node.logical) in _LOGICAL else {}
    return {"type": node.kind, **logical} if logical else node.kind
