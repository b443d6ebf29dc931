"""Can two schemas read each other? By Apache Avro's own checker, for whoever asks about any two.

Only its checker is asked: its decoder raises for an unknown enum symbol although the reader has a default.
"""

from __future__ import annotations

import json
from typing import Any

import avro.compatibility
import avro.schema

from schemas.frame import NoSchema


def compatibility_messages(one: Any, other: Any) -> list[str]:
    """What stands against these two schemas side by side, for people and tools that ask about a schema of their own.

    Only whether each reads what the other writes; the rules of this house (`schemas.gate`) are not asked.
    """
    found = []
    for reader, writer, way in ((one, other, "cannot read it"), (other, one, "cannot be read by it")):
        try:
            found += [f"{way}: {said}" for said in avro_refusals(reader, writer)]
        except NoSchema as error:
            return [f"no Avro schema: {error}"[:300]]
    return found


def avro_refusals(reader: Any, writer: Any) -> tuple[str, ...]:
    """What the checker has against this reader for that writer, as `place: reason`; empty for nothing.
    Raises NoSchema."""
    checker: Any = avro.compatibility.ReaderWriterCompatibilityChecker
    result = checker().get_compatibility(parsed_by_avro(reader), parsed_by_avro(writer))
    if result.compatibility is avro.compatibility.SchemaCompatibilityType.compatible:
        return ()
    kinds = ", ".join(sorted({kind.value.replace("_", " ") for kind in result.incompatibilities}))
    return (f"{', '.join(sorted(result.locations))}: {kinds} ({'; '.join(sorted(result.messages))})",)


def parsed_by_avro(definition: Any) -> Any:
    """A schema as Apache Avro's library has it. Raises NoSchema."""
    try:
        return avro.schema.parse(json.dumps(definition))
    except Exception as error:
        # It may be a stranger's; whatever the library says of it, it is the schema that is at fault.
        raise NoSchema(f"{type(error).__name__}: {error}") from error
