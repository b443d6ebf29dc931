"""What must hold of the lock file and the files beside it, so that an id on the wire means one schema for ever."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from schemas.facts import SchemaPublished
from schemas.frame import NoSchema, fingerprint
from schemas.gate.catalogue import Catalogue, Entry, drop_advice, golden_name
from schemas.gate.findings import Finding
from schemas.lockfile import LOCK_FILE, text_digest
from schemas.ranges import INT_MAX

_KINDS: dict[str, type] = {
    "id": int,
    "subject": str,
    "version": int,
    "record": str,
    "fingerprint": str,
    "sha256": str,
    "file": str,
}
_ADD = "publish schemas only by: inferlog schemas add FILE.avsc"


def lock_findings(found: Catalogue, *, drafts: Collection[int] = ()) -> tuple[Finding, ...]:
    """Where the lock file contradicts itself or the files beside it.

    `drafts` are the ids of entries that are known to be in no commit yet, which may still be taken back.
    """
    if (lock := found.lock_unreadable()) is not None:
        return (lock,)
    broken = [*found.unreadable(drafts), *entry_findings(found.entries)]
    if broken:
        return tuple(broken)
    fixed = (f for e in found.entries for f in fixed_findings(e["record"], e["version"]))
    own = (*_numbers(found.entries), *_subjects(found.entries), *fixed)
    return (*own, *_files(found, drafts), *_schemas(found, drafts))


def fixed_findings(record: str, version: int) -> tuple[Finding, ...]:
    """A version of the one record that never gets another."""
    if record != SchemaPublished.SCHEMA or version == 1:
        return ()
    problem = (
        "SchemaPublished never changes: it is what teaches a running program schemas it does not know, and an older "
        "one could not read the record that would teach it this version."
    )
    remedy = "leave it as it is, and tell what is new in a record of its own on a topic of its own (decision 9)."
    return (Finding(record=record, path="", rule="never-changes", problem=problem, remedy=remedy),)


def grown_findings(older: Sequence[Entry], newer: Sequence[Entry], *, since: str) -> tuple[Finding, ...]:
    """Where a lock file is not an older one (`since` says which) with entries added at its end.

    An entry may gain keys; it never loses one or changes its value.
    """
    return tuple(_grown(older, newer, since))


def _lock(entry: Entry | None, rule: str, problem: str, remedy: str, path: str = "") -> Finding:
    name = LOCK_FILE if entry is None else f"{LOCK_FILE} id {entry.get('id')} ({entry.get('record')})"
    return Finding(record=name, path=path, rule=rule, problem=problem, remedy=remedy)


def _grown(older: Sequence[Entry], newer: Sequence[Entry], since: str) -> Iterator[Finding]:
    now = {e.get("id"): e for e in newer}
    for was in older:
        entry = now.get(was.get("id"))
        if entry is None:
            problem = f"The entry was there in {since} and is gone; bytes with this id lie on the log for years."
            yield _lock(was, "append-only", problem, "put the entry, its schema file and its golden file back.")
            continue
        for key, value in was.items():
            if entry.get(key) != value:
                problem = f"{key} was {value!r} in {since} and is {entry.get(key)!r}; an id means one thing for ever."
                remedy = (
                    f"restore the entry and its file. If two branches took the same id, the one merged later takes "
                    f"the next free one (inferlog schemas add --id N); else {_ADD}."
                )
                yield _lock(was, "append-only", problem, remedy, path=key)
    kept = [e.get("id") for e in older if e.get("id") in now]
    if [e.get("id") for e in newer][: len(kept)] != kept:
        problem = f"The entries no longer begin with those of {since}, in their order; new ones are added at the end."
        yield _lock(None, "append-only", problem, f"restore the order; {_ADD}.")


def entry_findings(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Entries that lack something, or have it of another type; nothing else can be asked of them then."""
    for entry in entries:
        for key, kind in _KINDS.items():
            if not isinstance(entry.get(key), kind) or isinstance(entry[key], bool):
                problem = f"{key} is {entry.get(key)!r}, expected {kind.__name__}."
            elif kind is int and not 1 <= entry[key] <= INT_MAX:
                problem = f"{key} is {entry[key]}, expected 1 to {INT_MAX}."
            else:
                continue
            yield _lock(entry, "entry", problem, f"restore the entry; {_ADD}.", path=key)


def _numbers(entries: Sequence[Entry]) -> Iterator[Finding]:
    highest = 0
    versions: dict[str, int] = {}
    for entry in entries:
        if entry["id"] <= highest:
            problem = f"The id {entry['id']} comes after {highest}: ids are used once and ascend."
            remedy = f"give the newer entry the id {max(e['id'] for e in entries) + 1}, and write nothing before."
            yield _lock(entry, "id", problem, remedy, path="id")
        highest = max(highest, entry["id"])
        expected = versions.get(entry["record"], 0) + 1
        if entry["version"] != expected:
            problem = f"The version is {entry['version']} and {expected} comes next for this record."
            yield _lock(entry, "version", problem, f"number versions from 1 without gaps; {_ADD}.", path="version")
        versions[entry["record"]] = entry["version"]


def _subjects(entries: Sequence[Entry]) -> Iterator[Finding]:
    subjects: dict[str, str] = {}
    records: dict[str, str] = {}
    for entry in entries:
        if subjects.setdefault(entry["record"], entry["subject"]) != entry["subject"]:
            problem = f"The record's subject was {subjects[entry['record']]} in earlier versions."
            remedy = "keep the subject: readers ask for all versions of a record under one name."
            yield _lock(entry, "subject", problem, remedy, path="subject")
        if records.setdefault(entry["subject"], entry["record"]) != entry["record"]:
            problem = f"The subject {entry['subject']} is that of {records[entry['subject']]}."
            yield _lock(entry, "subject", problem, "write each record to a topic of its own.", path="subject")
        if not entry["subject"].endswith("-value"):
            problem = f"The subject {entry['subject']} is not the topic's name and -value."
            remedy = "name it <topic>-value, which is where clients look."
            yield _lock(entry, "subject", problem, remedy, path="subject")


def _files(found: Catalogue, drafts: Collection[int]) -> Iterator[Finding]:
    files = [e["file"] for e in found.entries]
    for entry in found.entries:
        if entry["file"] not in found.avro:
            problem = f"The file schemas/avro/{entry['file']} is missing."
            draft = entry["id"] in drafts
            remedy = drop_advice(entry) if draft else f"restore it: git checkout -- schemas/avro/{entry['file']}"
            yield _lock(entry, "file", problem, remedy, path="file")
        if files.count(entry["file"]) > 1:
            problem = f"schemas/avro/{entry['file']} is the file of several entries."
            yield _lock(entry, "file", problem, "give each version its own file.", path="file")
    for name in sorted(set(found.avro) - set(files)):
        problem = "The schema file has no entry in the lock file, so it has no id and nothing can be written with it."
        remedy = f"publish it: inferlog schemas add schemas/avro/{name}  (or delete it)."
        yield Finding(record=f"avro/{name}", path="", rule="file", problem=problem, remedy=remedy)
    for name in sorted(set(found.golden) - {golden_name(e) for e in found.entries}):
        problem = "The golden file belongs to no entry of the lock file."
        yield Finding(record=f"golden/{name}", path="", rule="golden", problem=problem, remedy="delete it.")


def _schemas(found: Catalogue, drafts: Collection[int]) -> Iterator[Finding]:
    for entry in found.entries:
        definition = found.definitions.get(entry["file"])
        if definition is None:
            continue
        draft = entry["id"] in drafts
        if problem := _altered(entry, definition):
            remedy = (
                drop_advice(entry)
                if draft
                else (
                    f"take the change back (git checkout -- schemas/avro/{entry['file']}), copy the file, make the "
                    "change in the copy, and publish it as a new version: inferlog schemas add COPY.avsc"
                )
            )
            yield _lock(entry, "published", problem, remedy, path="file")
        elif error := found.golden_error(entry, definition):
            problem = f"The golden file schemas/golden/{golden_name(entry)} does not hold: {error}."
            back = drop_advice(entry) if draft else f"restore it: git checkout -- schemas/golden/{golden_name(entry)}"
            if isinstance(found.goldens.get(golden_name(entry), {}).get("record"), dict):
                anew = f"if its record was edited, make its bytes anew: inferlog schemas golden {golden_name(entry)}"
                back = f"{anew}  Otherwise {back}"
            yield _lock(entry, "golden", problem, back)


def _altered(entry: Entry, definition: dict[str, object]) -> str:
    name = f"{definition.get('namespace')}.{definition.get('name')}"
    if name != entry["record"]:
        return f"schemas/avro/{entry['file']} defines {name}."
    try:
        looks = fingerprint(definition)
    except NoSchema as error:
        return f"schemas/avro/{entry['file']} is no Avro schema any more: {error}."
    if looks != entry["fingerprint"]:
        return f"schemas/avro/{entry['file']} was edited after it was published; its bytes would look different."
    if text_digest(definition) != entry["sha256"]:
        return (
            f"schemas/avro/{entry['file']} was edited after it was published: a doc or a default is not what it was, "
            "and what a field means is part of what was published."
        )
    return ""
