"""May this schema follow those? Every version of a record must read what every other version writes.

Three judges: the rules of this house (`house_rules`, `changes`), which say what to do instead; Apache Avro's own
checker; and a real decode with fastavro, which is what runs in production. The last two are heard where the first is
content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, cast

import avro.compatibility
import avro.schema
import fastavro
from fastavro.schema import fingerprint as _fingerprint
from fastavro.schema import to_parsing_canonical_form

from schemas.changes import change_findings
from schemas.findings import Finding
from schemas.house_rules import form_findings
from schemas.lockfile import text_digest
from schemas.outline import SchemaError, outline

Definition = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version of a record: its schema as parsed JSON and, when there is one, a golden record's Avro body."""

    number: int
    definition: Definition
    golden: bytes | None = None


class NoSchema(ValueError):
    """JSON that Avro's libraries, or we, do not take for a schema; the message says why."""


class Undecodable(ValueError):
    """Bytes that a schema cannot read; the message says why."""


def may_follow(candidate: Version, earlier: Sequence[Version]) -> tuple[Finding, ...]:
    """Why this version may not stand beside those; empty when it may. Looks at each pair in both directions.

    What the candidate breaks by itself is told alone, since comparing a malformed schema explains nothing.
    """
    try:
        newer = outline(candidate.definition)
    except SchemaError as error:
        return (_no_schema(candidate.definition, error),)
    # Ours first, since it says what to do; the libraries would refuse some of it too.
    if problems := form_findings(newer):
        return problems
    for parse in (_fast, _avro):
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


def history_findings(versions: Sequence[Version]) -> tuple[Finding, ...]:
    """The same for all versions of one record, oldest first: every pair, both ways."""
    found = [f for n, version in enumerate(versions) for f in may_follow(version, versions[:n])]
    return tuple(dict.fromkeys(found))


def avro_refusals(reader: Definition, writer: Definition) -> tuple[str, ...]:
    """What Apache Avro's checker has against this reader for that writer, as `place: reason`; empty for nothing.
    Raises NoSchema.

    Only its checker is asked: its decoder raises for an unknown enum symbol although the reader has a default.
    """
    checker: Any = avro.compatibility.ReaderWriterCompatibilityChecker
    result = checker().get_compatibility(_avro(reader), _avro(writer))
    if result.compatibility is avro.compatibility.SchemaCompatibilityType.compatible:
        return ()
    kinds = ", ".join(sorted({kind.value.replace("_", " ") for kind in result.incompatibilities}))
    return (f"{', '.join(sorted(result.locations))}: {kinds} ({'; '.join(sorted(result.messages))})",)


def compatibility_messages(one: Any, other: Any) -> list[str]:
    """What stands against these two schemas side by side, for people and tools that ask about a schema of their own.

    Only whether each reads what the other writes, by Apache Avro's checker; the rules of this house are not asked.
    """
    found = []
    for reader, writer, way in ((one, other, "cannot read it"), (other, one, "cannot be read by it")):
        try:
            found += [f"{way}: {said}" for said in avro_refusals(reader, writer)]
        except NoSchema as error:
            return [f"no Avro schema: {error}"[:300]]
    return found


def fingerprint(definition: Definition) -> str:
    """CRC-64-AVRO of the parsing canonical form, as in the lock file (hex, little-endian). Raises NoSchema.

    The codec has the same; it cannot be asked here, since it refuses to load beside a schema that was tampered with.
    """
    return _fingerprint(to_parsing_canonical_form(_fast(definition)), "CRC-64-AVRO")


def write(definition: Definition, datum: Mapping[str, Any]) -> bytes:
    """The Avro body of a datum. Raises what fastavro raises for a value that does not fit, and for one left out."""
    out = BytesIO()
    fastavro.schemaless_writer(out, _fast(definition), cast("dict[str, Any]", datum), strict=True)
    return out.getvalue()


def read(body: bytes, *, writer: Definition, reader: Definition | None = None) -> dict[str, Any]:
    """The datum in an Avro body, as the reader's schema has it. Raises Undecodable, also for bytes left over."""
    source = BytesIO(body)
    try:
        datum = fastavro.schemaless_reader(source, _fast(writer), None if reader is None else _fast(reader))
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


def _avro(definition: Definition) -> Any:
    try:
        return avro.schema.parse(json.dumps(definition))
    except Exception as error:
        # It may be a stranger's; whatever the library says of it, it is the schema that is at fault.
        raise NoSchema(f"{type(error).__name__}: {error}") from error


def _fast(definition: Definition) -> Any:
    try:
        return fastavro.parse_schema(definition, named_schemas={})
    except Exception as error:
        raise NoSchema(f"{type(error).__name__}: {error}") from error
