"""Versions that are in no commit yet: which they are, and what is left when one is taken back.

Once an entry is committed others may have its id, so it stays; before that it is the author's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from schemas.gate.catalogue import Catalogue, Entry, golden_name
from schemas.gate.findings import Refused
from schemas.gate.lock_rules import entry_findings
from schemas.lockfile import text_digest

Past = Sequence[tuple[str, Sequence[Entry]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A version taken back: its entry and what is published without it.

    `edited` says that the schema file is not what the entry is of; such a file is kept, being nowhere else.
    """

    entry: Entry
    catalogue: Catalogue
    edited: bool


def draft_ids(entries: Sequence[Entry], past: Past) -> frozenset[int]:
    """Ids of entries that none of these lock files of the past has; none without a past, which would tell nothing."""
    return frozenset(e["id"] for e in entries if isinstance(e.get("id"), int) and past and not _commit(e, past))


def removal(found: Catalogue, name: str, past: Past) -> Removal:
    """What is left without the newest version of a record, named by its name or its file. Raises Refused."""
    if (lock := found.lock_unreadable()) is not None:
        raise Refused([lock])
    if broken := tuple(entry_findings(found.entries)):
        raise Refused(broken)
    named = [e for e in found.entries if name in _names(e)]
    if not named:
        problem = "No version of a record has this name."
        raise Refused.because(name, "draft", problem, "name a record, or its schema file: inferlog schemas list")
    records = list(dict.fromkeys(str(e["record"]) for e in named))
    if len(records) > 1:
        problem = f"Several records have this name: {', '.join(records)}."
        raise Refused.because(name, "draft", problem, "give the full name.")
    (record,) = records
    newest = found.entries_of(record)[-1]
    file = str(newest["file"])
    if name in (named[0].get("file"), f"schemas/avro/{named[0].get('file')}") and named[0] is not newest:
        problem = f"{name} is version {named[0]['version']}, and version {newest['version']} came after it."
        raise Refused.because(record, "draft", problem, f"drop the newest version first, if it may be: {file}")
    version = f"Version {newest['version']} (id {newest['id']})"
    if not past:
        problem = f"There is no git history here, so nobody can tell whether {version} is published."
        raise Refused.because(record, "draft", problem, "run this in the clone in which it was added.")
    if commit := _commit(newest, past):
        problem = f"{version} is in commit {commit}, so it counts as published: there may be records with its id."
        remedy = f"copy schemas/avro/{file}, make the change in the copy, and inferlog schemas add COPY.avsc"
        raise Refused.because(record, "published", problem, remedy)
    definition = found.definitions.get(file)
    left = [e for e in found.entries if e is not newest]
    catalogue = replace(
        found,
        lock=json.dumps(left, indent=2) + "\n",
        avro={n: t for n, t in found.avro.items() if n != file},
        golden={n: t for n, t in found.golden.items() if n != golden_name(newest)},
    )
    edited = file in found.avro and (definition is None or text_digest(definition) != newest.get("sha256"))
    return Removal(entry=newest, catalogue=catalogue, edited=edited)


def _commit(entry: Entry, past: Past) -> str:
    """The newest commit that has the entry; empty when none has."""
    mine = _identity(entry)
    return next((commit for commit, entries in past if any(_identity(e) == mine for e in entries)), "")


def _identity(entry: Entry) -> tuple[object, ...]:
    return entry.get("id"), entry.get("record"), entry.get("version")


def _names(entry: Entry) -> set[str]:
    record, file = str(entry.get("record")), str(entry.get("file"))
    first = file.partition(".")[0]
    return {record, record.rpartition(".")[2], file, file.removesuffix(".avsc"), first, f"schemas/avro/{file}"}
