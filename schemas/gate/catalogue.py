"""Everything published, as found: the lock file's entries as they stand there, the schema files, the golden files.

Nothing is believed yet, unlike in `lockfile`: this is what the gate looks at, and it must be able to look at what is
wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from schemas.document import NoDocument, parsed
from schemas.gate.evolution import Version
from schemas.gate.findings import Finding
from schemas.gate.golden import GoldenError, golden_body
from schemas.lockfile import LOCK_FILE

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)  # no slots: what is parsed once is kept
class Catalogue:
    """Texts by file name: the lock file, `avro/*.avsc`, `golden/*.json`.

    `refused` are files of which there is no text (empty here), by their path in `schemas`, with what was found there.
    """

    lock: str
    avro: Mapping[str, str]
    golden: Mapping[str, str]
    refused: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The lock file's entries in its order; empty when it cannot be read, which `unreadable` then says."""
        found = _parsed(self.lock)
        return tuple(found) if isinstance(found, list) and all(isinstance(e, dict) for e in found) else ()

    @cached_property
    def definitions(self) -> Mapping[str, dict[str, Any]]:
        """The schema files that hold a JSON object, parsed, by name."""
        return {name: found for name, text in self.avro.items() if isinstance(found := _parsed(text), dict)}

    @cached_property
    def goldens(self) -> Mapping[str, dict[str, Any]]:
        """The golden files that hold a JSON object, parsed, by name."""
        return {name: found for name, text in self.golden.items() if isinstance(found := _parsed(text), dict)}

    def lock_unreadable(self) -> Finding | None:
        """What is wrong with a lock file of which no entry can be read; nothing else can be judged then."""
        if self.entries:
            return None
        why = self.refused.get(LOCK_FILE) or _wrong(self.lock)
        problem = "The file is no list of entries, one JSON object each" + (f": {why}." if why else ".")
        remedy = f"mend it there (a bracket, a conflict marker?), or restore it: git checkout -- schemas/{LOCK_FILE}"
        return Finding(record=LOCK_FILE, path="", rule="file", problem=problem, remedy=remedy)

    def unreadable(self, drafts: Collection[int] = ()) -> Iterable[Finding]:
        """Schema and golden files that hold something other than a JSON object. `drafts` are ids not committed yet."""
        advice = {}
        for entry in self.entries:
            for name in (f"avro/{entry.get('file')}", f"golden/{golden_name(entry)}"):
                draft = isinstance(entry.get("id"), int) and entry["id"] in drafts
                advice[name] = drop_advice(entry) if draft else f"restore it: git checkout -- schemas/{name}"
        bad = {f"avro/{n}": text for n, text in self.avro.items() if n not in self.definitions}
        bad |= {f"golden/{n}": text for n, text in self.golden.items() if n not in self.goldens}
        for name, text in bad.items():
            why = self.refused.get(name) or _wrong(text) or "it holds something else"
            problem = f"The file is not the JSON that is expected here, one object: {why}."
            remedy = advice.get(name, "mend it or delete it; no entry of the lock file names it.")
            yield Finding(record=name, path="", rule="file", problem=problem, remedy=remedy)

    def records(self) -> tuple[str, ...]:
        """Full names of the records with an entry, in the order of their first id."""
        return tuple(dict.fromkeys(str(e["record"]) for e in self.entries if "record" in e))

    def entries_of(self, record: str) -> list[Entry]:
        """The entries of a record, oldest version first."""
        return sorted((e for e in self.entries if e.get("record") == record), key=_version)

    def versions_of(self, record: str) -> list[Version]:
        """The versions of a record whose schema can be read, oldest first, with their golden records where sound."""
        found = []
        for entry in self.entries_of(record):
            definition = self.definitions.get(str(entry.get("file")))
            if definition is None:
                continue
            try:
                golden = golden_body(self.goldens.get(golden_name(entry), {}), int(entry.get("id", 0)), definition)
            except GoldenError:
                golden = None  # told by the rules of the lock
            found.append(Version(number=_version(entry), definition=definition, golden=golden))
        return found

    def golden_error(self, entry: Entry, definition: dict[str, Any]) -> str:
        """What is wrong with an entry's golden file; empty when nothing is."""
        document = self.goldens.get(golden_name(entry))
        if document is None:
            return "there is none"
        try:
            golden_body(document, int(entry["id"]), definition)
        except GoldenError as error:
            return str(error)
        return ""


def drop_advice(entry: Entry) -> str:
    """How to take back a version that is not committed yet."""
    file = entry.get("file")
    return f"it is not committed yet: inferlog schemas drop {file}, mend it, and inferlog schemas add it again."


def golden_name(entry: Entry) -> str:
    """The golden file of an entry: its schema file's name with another ending."""
    return str(entry.get("file", "")).removesuffix(".avsc") + ".json"


def _version(entry: Entry) -> int:
    found = entry.get("version")
    return found if isinstance(found, int) else 0  # anything else is told by the rules of the lock


def _parsed(text: str) -> Any:
    try:
        return parsed(text)
    except NoDocument:
        return None


def _wrong(text: str) -> str:
    """Why a text is no document; empty when it is one."""
    try:
        parsed(text)
    except NoDocument as error:
        return str(error)
    return ""
