"""Publishing a schema: what is written for it and what is left to do, or why it may not be.

Pure: the files are values until `checkout` writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from schemas.catalogue import Catalogue, Entry, golden_name
from schemas.evolution import Version, fingerprint, may_follow
from schemas.facts import RECORD_TYPES
from schemas.findings import Finding
from schemas.gate import class_findings_of
from schemas.golden import golden_body, golden_text
from schemas.lock_rules import lock_findings
from schemas.lockfile import text_digest
from schemas.topics import all_topics


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """A new version: its entry, everything published with it, and the steps that people have to do."""

    entry: Entry
    catalogue: Catalogue
    next_steps: tuple[str, ...]


class Refused(ValueError):
    """The schema may not be published; `findings` say why."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(f.text() for f in findings))
        self.findings = tuple(findings)


def addition(found: Catalogue, text: str, *, file: str, topic: str | None = None) -> Addition:
    """The schema in `text`, read from `file`, as the next version of its record. Raises Refused.

    `topic` names the topic of a record's first version where `schemas/topics.py` does not.
    """
    definition = _parse(text, file)
    name = f"{definition.get('namespace')}.{definition.get('name')}"
    earlier = found.entries_of(name)
    version = len(earlier) + 1
    target = _target(definition, earlier, version)
    # A file that waits in its place to be published is not yet an error, unlike everything else.
    if target in found.avro and found.definitions.get(target) != definition:
        problem = f"schemas/avro/{target} is there already, with something else in it."
        raise _refused(name, "file", problem, "publish that file, or delete it if it is a draft.")
    clean = replace(
        found,
        avro={n: t for n, t in found.avro.items() if n != target},
        golden={n: t for n, t in found.golden.items() if n != golden_name({"file": target})},
    )
    if broken := lock_findings(clean):
        raise Refused(broken)
    versions = clean.versions_of(name)
    if broken := may_follow(Version(number=version, definition=definition), versions):
        raise Refused(broken)
    schema_id = max(int(e["id"]) for e in clean.entries) + 1
    entry: Entry = {
        "id": schema_id,
        "subject": _subject(clean, name, earlier, topic),
        "version": version,
        "record": name,
        "fingerprint": fingerprint(definition),
        "sha256": text_digest(definition),
        "file": target,
    }
    previous = clean.goldens[golden_name(earlier[-1])]["record"] if earlier else None
    golden = golden_text(schema_id, definition, previous)
    body = golden_body(json.loads(golden), schema_id, definition)
    new = Version(number=version, definition=definition, golden=body)
    if broken := may_follow(new, versions):
        raise Refused(broken)
    grown = Catalogue(
        lock=json.dumps([*clean.entries, entry], indent=2) + "\n",
        avro={**clean.avro, target: text},
        golden={**clean.golden, golden_name(entry): golden},
    )
    return Addition(entry=entry, catalogue=grown, next_steps=_next_steps(name, [*versions, new], entry))


def _parse(text: str, file: str) -> dict[str, Any]:
    try:
        definition = json.loads(text)
    except ValueError as error:
        raise _refused(file, "file", f"The file is not JSON: {error}.", "write the schema as a JSON object.") from error
    if not isinstance(definition, dict):
        raise _refused(file, "file", "The file holds no JSON object.", "write the schema as a JSON object.")
    return definition


def _target(definition: dict[str, Any], earlier: Sequence[Entry], version: int) -> str:
    """The file's name: that of the first version, and from the second on the number."""
    if earlier:
        return f"{str(earlier[0]['file']).removesuffix('.avsc')}.v{version}.avsc"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(definition.get("name"))).lower() + ".avsc"


def _subject(found: Catalogue, name: str, earlier: Sequence[Entry], topic: str | None) -> str:
    if earlier:
        known = str(earlier[0]["subject"])
        if topic is not None and known != f"{topic}-value":
            problem = f"The record is written to {known.removesuffix('-value')}, not to {topic}."
            raise _refused(name, "subject", problem, "leave --topic out.")
        return known
    declared = next((t.name for t in all_topics() if name == t.record.SCHEMA), None)
    if topic is None and declared is None:
        problem = "The record is new and no topic is declared for it."
        raise _refused(name, "subject", problem, "say which: --topic inference.<facts>.v1")
    if topic is not None and declared is not None and topic != declared:
        problem = f"schemas/topics.py writes the record to {declared}, not to {topic}."
        raise _refused(name, "subject", problem, "leave --topic out.")
    subject = f"{declared or topic}-value"
    taken = next((e["record"] for e in found.entries if e["subject"] == subject), None)
    if taken is not None:
        problem = f"The topic {declared or topic} carries {taken}."
        raise _refused(name, "subject", problem, "write each record to a topic of its own.")
    return subject


def _next_steps(name: str, versions: Sequence[Version], entry: Entry) -> tuple[str, ...]:
    steps = [f.remedy for f in class_findings_of(name, versions)]
    if name not in {t.record.SCHEMA for t in all_topics()} and name not in {c.SCHEMA for c in RECORD_TYPES}:
        steps.append(f"declare the topic {str(entry['subject']).removesuffix('-value')} in schemas/topics.py.")
    golden = golden_name(entry)
    steps += [
        f"give the new fields telling values in schemas/golden/{golden}; then  inferlog schemas golden {golden}",
        "make check",
        "commit it all together; on release run  inferlog provision  before any program that writes the new version.",
    ]
    return tuple(steps)


def _refused(record: str, rule: str, problem: str, remedy: str) -> Refused:
    return Refused([Finding(record=record, path="", rule=rule, problem=problem, remedy=remedy)])
