"""The gate of `make check`: everything published, looked at from every side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from schemas.datum import Shape
from schemas.facts import RECORD_TYPES
from schemas.gate.catalogue import Catalogue, Entry
from schemas.gate.classes import class_findings
from schemas.gate.evolution import Version, history_findings, read
from schemas.gate.findings import Finding
from schemas.gate.lock_rules import grown_findings, lock_findings
from schemas.outline import outline

_CLASSES: Mapping[str, type[Any]] = {cls.SCHEMA: cls for cls in RECORD_TYPES}


def gate_findings(
    found: Catalogue, *, older: Sequence[tuple[str, Sequence[Entry]]] = (), drafts: Collection[int] = ()
) -> tuple[Finding, ...]:
    """Every broken rule. `older` are the entries of earlier lock files, newest first, each with its commit; `drafts`
    the ids of entries that are known to be in no commit.

    Schemas and classes are looked at when the lock file is sound, since otherwise nobody knows what was published.
    """
    if (lock := found.lock_unreadable()) is not None:
        return (lock,)
    broken = list(lock_findings(found, drafts=drafts))
    for name, entries in older:
        broken += grown_findings(entries, found.entries, since=name)
    if not broken:
        for record in found.records():
            versions = found.versions_of(record)
            broken += history_findings(versions) or class_findings_of(record, versions)
    # What differs from one older lock file differs from those before it too, and is told once.
    return tuple({(f.record, f.path, f.rule): f for f in reversed(broken)}.values())[::-1]


def class_findings_of(record: str, versions: Sequence[Version]) -> tuple[Finding, ...]:
    """Whether today's class has the newest schema's fields, and can be made from the bytes of every version."""
    cls = _CLASSES.get(record)
    broken = class_findings(record, cls, outline(versions[-1].definition))
    return broken if broken or cls is None else tuple(_made(record, cls, versions))


def _made(record: str, cls: type[Any], versions: Sequence[Version]) -> Iterator[Finding]:
    shape: Shape[Any] = Shape(cls)
    newest = versions[-1].definition
    for version in versions:
        if version.golden is None:
            continue
        datum = read(version.golden, writer=version.definition, reader=newest)
        try:
            shape.record(datum)
        except (TypeError, ValueError) as error:
            problem = f"{cls.__name__} cannot be made from version {version.number}'s golden record: {error}."
            remedy = f"let {cls.__name__} take what was written then; bytes of that version are on the log."
            yield Finding(record=record, path="", rule="typed-class", problem=problem, remedy=remedy)
