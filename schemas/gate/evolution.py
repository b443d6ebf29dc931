"""May this schema follow those? Every version of a record must read what every other version writes.

Three judges: the rules of this house (`house_rules`, `changes`), which say what to do instead; Apache Avro's own
checker; and a real decode with fastavro, which is what runs in production. The last two are heard where the first is
content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import fastavro

from schemas.announcement import require_bounded
from schemas.compatibility import avro_refusals, parsed_by_avro
from schemas.frame import NoSchema, parsed
from schemas.gate.changes import change_findings
from schemas.gate.findings import Finding
from schemas.gate.house_rules import form_findings
from schemas.lockfile import text_digest
from schemas.outline import Node, SchemaError, outline

Definition = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version of a record: its schema as parsed JSON and, when there is one, a golden record's Avro body."""

    number: int
    definition: Definition
    golden: bytes | None = None


class Undecodable(ValueError):
    """Bytes that a schema cannot read; the message says why."""


def may_follow(candidate: Version, earlier: Sequence[Version]) -> tuple[Finding, ...]:
    """Why this version may not stand beside those; empty when it may. Looks at each pair in both directions.

    A candidate that breaks rules by itself is compared by ours only, and only where it is well formed: what stands
    against it is told at once, and the libraries explain nothing about a malformed schema.
    """
    try:
        newer = outline(candidate.definition)
    except SchemaError as error:
        return (_no_schema(candidate.definition, error),)
    # Ours first, since it says what to do; the libraries would refuse some of it too.
    if problems := form_findings(newer):
        return problems + _compared(newer, candidate, earlier, malformed=problems)
    try:
        require_bounded(newer)
    except SchemaError as error:
        problem = f"Running programs would not learn this schema: {error}."
        remedy = "leave that out; to a program of an earlier release it looks like an attack."
        return (Finding(record=newer.name, path="", rule="learnable", problem=problem, remedy=remedy),)
    for parse in (parsed, parsed_by_avro):
        try:
            parse(candidate.definition)
        except NoSchema as error:
            return (_no_schema(candidate.definition, error),)
    found: list[Finding] = []
    for other in earlier:
        adjacent = other.number == candidate.number - 1
        if text_digest(other.definition) == text_digest(candidate.definition):
            problem = f"This is version {other.number}, word for word."
            remedy = f"nothing needs to be published; records are written with version {other.number} as they are."
            found.append(Finding(record=newer.name, path="", rule="unchanged", problem=problem, remedy=remedy))
            continue
        broken = change_findings(outline(other.definition), newer, adjacent=adjacent)
        found += broken or _tried(newer.name, candidate, other)
    return tuple(dict.fromkeys(found))


def _compared(
    newer: Node, candidate: Version, earlier: Sequence[Version], *, malformed: Sequence[Finding]
) -> tuple[Finding, ...]:
    """What our rules of change say of the places that are not malformed; a missing doc malforms nothing."""
    bad = [f for f in malformed if f.rule != "doc"]
    if any(f.rule in ("record", "rename") for f in bad):
        return ()  # it is another thing, or the renaming has been told
    found = (
        f
        for other in earlier
        for f in change_findings(outline(other.definition), newer, adjacent=other.number == candidate.number - 1)
        if f.path not in {b.path for b in bad}
    )
    return tuple(dict.fromkeys(found))


def history_findings(versions: Sequence[Version]) -> tuple[Finding, ...]:
    """The same for all versions of one record, oldest first: every pair, both ways."""
    found = [f for n, version in enumerate(versions) for f in may_follow(version, versions[:n])]
    return tuple(dict.fromkeys(found))


def write(definition: Definition, datum: Mapping[str, Any]) -> bytes:
    """The Avro body of a datum. Raises what fastavro raises for a value that does not fit, and for one left out."""
    out = BytesIO()
    fastavro.schemaless_writer(out, parsed(definition), cast("dict[str, Any]", datum), strict=True)
    return out.getvalue()


def read(body: bytes, *, writer: Definition, reader: Definition | None = None) -> dict[str, Any]:
    """The datum in an Avro body, as the reader's schema has it. Raises Undecodable, also for bytes left over."""
    source = BytesIO(body)
    try:
        datum = fastavro.schemaless_reader(source, parsed(writer), None if reader is None else parsed(reader))
    except Exception as error:
        raise Undecodable(f"{type(error).__name__}: {error}") from error
    if rest := len(body) - source.tell():
        raise Undecodable(f"{rest} bytes follow the record")
    return cast("dict[str, Any]", datum)


def _no_schema(definition: Definition, error: Exception) -> Finding:
    name = f"{definition.get('namespace', '')}.{definition.get('name', '?')}".lstrip(".")
    problem = f"This is no schema of a record: {error}."
    remedy = "compare it with a published one in schemas/avro."
    return Finding(record=name, path="", rule="avro", problem=problem, remedy=remedy)


def _tried(record: str, one: Version, other: Version) -> Iterator[Finding]:
    for reader, writer in ((one, other), (other, one)):
        pair = f"version {reader.number} as reader of version {writer.number}"
        for said in avro_refusals(reader.definition, writer.definition):
            problem = f"Apache Avro's checker refuses {pair}: {said}."
            yield Finding(record=record, path="", rule="avro-checker", problem=problem, remedy=_UNDO)
        if writer.golden is not None:
            problem = _lost(reader.definition, writer.definition, writer.golden)
            if problem:
                problem = f"The golden record does not survive {pair}: {problem}."
                yield Finding(record=record, path="", rule="golden-decode", problem=problem, remedy=_UNDO)


_UNDO = "take the change of this place back and add a field with a default instead."


def _lost(reader: Definition, writer: Definition, body: bytes) -> str:
    """What goes wrong when the reader takes these bytes: an error, or a value that is not what was written."""
    try:
        written = read(body, writer=writer)
        found = read(body, writer=writer, reader=reader)
    except Undecodable as error:
        return str(error)
    return _difference("", written, found)


def _difference(path: str, written: Any, found: Any) -> str:
    """The first value that both have and that differs; an unknown symbol may have become UNKNOWN."""
    if isinstance(written, dict) and isinstance(found, dict):
        shared = [(f"{path}.{k}" if path else k, v, found[k]) for k, v in written.items() if k in found]
    elif isinstance(written, list) and isinstance(found, list) and len(written) == len(found):
        shared = [(f"{path}[{n}]", *pair) for n, pair in enumerate(zip(written, found, strict=True))]
    elif written == found or (found == "UNKNOWN" and isinstance(written, str)):
        return ""
    else:
        return f"{path} was {written!r} and reads as {found!r}"
    return next((said for place in shared if (said := _difference(*place))), "")
