"""Is what somebody wants to publish a copy of what they think it is? Tells the copy of an old version, or of a file
under another name, which the rules of change would explain as something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.gate.catalogue import Catalogue
from schemas.gate.evolution import Version
from schemas.gate.findings import Finding
from schemas.outline import SchemaError, outline, walk


def field_paths(definition: Mapping[str, Any]) -> frozenset[str]:
    """Every field of a schema, also those inside, by its path; empty for what is no schema."""
    try:
        tree = outline(definition)
    except SchemaError:
        return frozenset()
    return frozenset(f"{path}.{f.name}" if path else f.name for path, node in walk(tree) for f in node.fields)


def old_copy(definition: Mapping[str, Any], versions: Sequence[Version]) -> tuple[int, frozenset[str]] | None:
    """The number of the version before the newest that this seems to be a copy of, and the fields it lacks for that."""
    mine = field_paths(definition)
    lost = field_paths(versions[-1].definition) - mine if versions else frozenset()
    if not lost:
        return None
    older = (v.number for v in reversed(versions[:-1]) if field_paths(v.definition) <= mine)
    return next(((number, lost) for number in older), None)


def old_copy_findings(
    name: str, definition: Mapping[str, Any], versions: Sequence[Version], *, newest: str, broken: Sequence[Finding]
) -> tuple[Finding, ...]:
    """What is said of a refused schema, `broken`, with the likely mistake in front. `newest` is the newest's file."""
    copied = old_copy(definition, versions)
    if copied is None:
        return tuple(broken)
    number, lost = copied
    problem = f"Your copy seems to be of version {number}: it lacks {', '.join(sorted(lost))}, which came later."
    remedy = f"take schemas/avro/{newest}, and make the change in a copy of that."
    first = Finding(record=name, path="", rule="old-copy", problem=problem, remedy=remedy)
    return (first, *(f for f in broken if f.path not in lost))


def misnamed(found: Catalogue, name: str, file: str) -> Finding | None:
    """Why a record of a new name cannot get the file that a published record has; None when none has it."""
    owner = next((str(e["record"]) for e in found.entries if e.get("file") == file), None)
    if owner is None:
        return None
    problem = f"schemas/avro/{file} is the published schema of {owner}, and this one is called {name}."
    remedy = (
        f"for the next version of that record keep its name and namespace, {owner}; for a new record choose a name "
        "that none has."
    )
    return Finding(record=name, path="", rule="names", problem=problem, remedy=remedy)
