"""Publishing a schema: what is written for it and what is left to do, or why it may not be.

Pure: the files are values until `checkout` writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schemas.announcement import MAX_TEXT_BYTES
from schemas.document import NoDocument, parsed
from schemas.facts import RECORD_TYPES
from schemas.frame import fingerprint
from schemas.gate.catalogue import Catalogue, Entry, golden_name
from schemas.gate.check import class_findings_of
from schemas.gate.copies import field_paths, misnamed, old_copy, old_copy_findings
from schemas.gate.evolution import Version, may_follow
from schemas.gate.findings import Finding, Refused
from schemas.gate.golden import GoldenError, golden_body, golden_text
from schemas.gate.lock_rules import entry_findings, fixed_findings, lock_findings
from schemas.lockfile import text_digest
from schemas.ranges import INT_MAX
from schemas.topics import TOPIC_NAME, all_topics


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """A new version: its entry, everything published with it, and the steps that people have to do."""

    entry: Entry
    catalogue: Catalogue
    next_steps: tuple[str, ...]


def addition(
    found: Catalogue,
    text: str,
    *,
    file: str,
    topic: str | None = None,
    schema_id: int | None = None,
    drafts: Collection[int] = (),
) -> Addition:
    """The schema in `text`, read from `file`, as the next version of its record. Raises Refused.

    `topic` names the topic of a record's first version where `schemas/topics.py` does not. `schema_id` is the next
    free one if not given. `drafts` are the ids of entries that are known to be in no commit yet.
    """
    if (lock := found.lock_unreadable()) is not None:
        raise Refused([lock])
    if malformed := tuple(entry_findings(found.entries)):
        raise Refused(malformed)
    definition = _parse(text, file)
    name = f"{definition.get('namespace')}.{definition.get('name')}"
    earlier = found.entries_of(name)
    version = len(earlier) + 1
    if fixed := fixed_findings(name, version):
        raise Refused(fixed)
    target = _target(definition, earlier, version)
    if not earlier and (other := misnamed(found, name, target)) is not None:
        raise Refused([other])
    # A file that waits in its place to be published is not yet an error, unlike everything else.
    if target in found.avro and found.definitions.get(target) != definition:
        problem = f"schemas/avro/{target} is there already, with something else in it."
        raise Refused.because(name, "file", problem, "publish that file, or delete it if it is a draft.")
    clean = replace(
        found,
        avro={n: t for n, t in found.avro.items() if n != target},
        golden={n: t for n, t in found.golden.items() if n != golden_name({"file": target})},
    )
    if broken := lock_findings(clean, drafts=drafts):
        raise Refused(broken)
    versions = clean.versions_of(name)
    if broken := may_follow(Version(number=version, definition=definition), versions):
        newest = str(earlier[-1]["file"]) if earlier else ""
        told = old_copy_findings(name, definition, versions, newest=newest, broken=broken)
        raise Refused([*told, *_replaces_draft(name, earlier, drafts)])
    taken_id = _id(clean, name, schema_id)
    entry: Entry = {
        "id": taken_id,
        "subject": _subject(clean, name, earlier, topic),
        "version": version,
        "record": name,
        "fingerprint": fingerprint(definition),
        "sha256": text_digest(definition),
        "file": target,
    }
    previous = clean.goldens[golden_name(earlier[-1])]["record"] if earlier else None
    try:
        golden = golden_text(taken_id, definition, previous)
        body = golden_body(json.loads(golden), taken_id, definition)
    except GoldenError as error:
        problem = f"No golden record can be made of it: {error}."
        raise Refused.because(name, "golden", problem, "compare it with a published schema in schemas/avro.") from error
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
    remedy = "write the schema as one JSON object, as those in schemas/avro are."
    try:
        definition = parsed(text)
    except NoDocument as error:
        raise Refused.because(file, "file", f"The file is no JSON document: {error}.", remedy) from error
    if not isinstance(definition, dict):
        raise Refused.because(file, "file", "The file holds no JSON object.", remedy)
    # As it will be announced on the log.
    size_bytes = len(json.dumps(definition, ensure_ascii=False).encode())
    if size_bytes > MAX_TEXT_BYTES:
        problem = f"The schema has {size_bytes} bytes, and running programs learn none above {MAX_TEXT_BYTES}."
        raise Refused.because(file, "size", problem, "split the record, or say less in its docs.")
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
            raise Refused.because(name, "subject", problem, "leave --topic out.")
        return known
    declared = next((t.name for t in all_topics() if name == t.record.SCHEMA), None)
    if topic is None and declared is None:
        problem = "The record is new and no topic is declared for it."
        raise Refused.because(name, "subject", problem, "say which: --topic inference.<facts>.v1")
    if topic is not None and not re.fullmatch(TOPIC_NAME, topic):
        problem = f"The topic {topic[:100]!r} is none of schemas/topics.py, and not named as a new one is."
        remedy = (
            "name it inference.<facts>.v1, with <facts> of a-z, 0-9 and '-' and without a namespace, as in "
            "inference.usage.v1; then declare it in schemas/topics.py."
        )
        raise Refused.because(name, "subject", problem, remedy)
    owner = next((t.record.SCHEMA for t in all_topics() if t.name == topic and name != t.record.SCHEMA), None)
    if owner is not None:
        problem = f"The topic {topic} carries {owner}."
        raise Refused.because(name, "subject", problem, "write each record to a topic of its own.")
    if topic is not None and declared is not None and topic != declared:
        problem = f"schemas/topics.py writes the record to {declared}, not to {topic}."
        raise Refused.because(name, "subject", problem, "leave --topic out.")
    subject = f"{declared or topic}-value"
    taken = next((e["record"] for e in found.entries if e["subject"] == subject), None)
    if taken is not None:
        problem = f"The topic {declared or topic} carries {taken}."
        raise Refused.because(name, "subject", problem, "write each record to a topic of its own.")
    return subject


def _id(found: Catalogue, name: str, asked: int | None) -> int:
    free = max(int(e["id"]) for e in found.entries) + 1
    if asked is not None and not free <= asked <= INT_MAX:
        problem = f"The id {asked} is not free: ids ascend, and the newest here is {free - 1}."
        raise Refused.because(name, "id", problem, f"take one from {free} to {INT_MAX}, or leave --id out.")
    return free if asked is None else asked


def _replaces_draft(name: str, earlier: Sequence[Entry], drafts: Collection[int]) -> list[Finding]:
    """That the version before this one may still be taken back, for somebody who wants to correct it."""
    if not earlier or earlier[-1]["id"] not in drafts:
        return []
    problem = f"Version {earlier[-1]['version']}, which this would follow, is not committed yet."
    remedy = f"if this is to replace it: inferlog schemas drop {earlier[-1]['file']}, and add this one again."
    return [Finding(record=name, path="", rule="draft", problem=problem, remedy=remedy)]


def _next_steps(name: str, versions: Sequence[Version], entry: Entry) -> tuple[str, ...]:
    steps = []
    if copied := old_copy(versions[-1].definition, versions[:-1]):
        gone = ", ".join(sorted(copied[1]))
        steps.append(
            f"see whether you copied version {copied[0]} by mistake: {gone} of version {versions[-2].number} is gone. "
            f"If so: inferlog schemas drop {entry['file']}, and start from the newest."
        )
    steps += [f.remedy for f in class_findings_of(name, versions)]
    if name not in {t.record.SCHEMA for t in all_topics()} and name not in {c.SCHEMA for c in RECORD_TYPES}:
        steps.append(f"declare the topic {str(entry['subject']).removesuffix('-value')} in schemas/topics.py.")
    golden = golden_name(entry)
    new, old = (field_paths(v.definition) for v in (versions[-1], versions[max(len(versions) - 2, 0)]))
    if len(versions) == 1 or new - old:
        what = "the fields" if len(versions) == 1 else "the new fields"
        steps.append(f"give {what} telling values in schemas/golden/{golden}; then  inferlog schemas golden {golden}")
    steps += [
        "make check",
        "commit it all together; on release run  inferlog provision  before any program that writes the new version.",
    ]
    return tuple(steps)
