"""The published schemas as a registry shows them: by id, by subject and version, and by what they look like.

Made once from the lock file and asked from memory. Which subjects exist depends on the installation's namespace and on
its pools: every pool's queue carries the same schemas, although the lock file names only the default one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson

from api.errors import NotFound, Unprocessable
from schemas.document import deeper_than
from schemas.facts import SchemaPublished
from schemas.frame import fingerprint
from schemas.keys import prefixed
from schemas.lockfile import LockedSchema, text_digest
from schemas.topics import POOL_NAME, Topic, requests_topic

NO_SUBJECT, NO_VERSION, NO_SCHEMA = "40401", "40402", "40403"
INVALID_SCHEMA, INVALID_VERSION = "42201", "42202"

# Libraries walk a schema by recursion, attributes that mean nothing included; the published ones are about 12 deep.
_DEEPEST = 100
_NEWEST = ("latest", "-1")
_POOL = re.compile(POOL_NAME)
# How clients name the default context, the only one here, and "any context".
_CONTEXT = re.compile(r"^:[.*]:")


def subject_of(topic: Topic) -> str:
    """The subject of a topic's values, by the rule that clients use when they are not told another."""
    return f"{topic.name}-value"


_DEFAULT_QUEUE = subject_of(requests_topic())
_QUEUE_START, _QUEUE_END = subject_of(requests_topic("/")).split("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One published schema. `subject` has no namespace; `text` is the schema as compact JSON, with its docs."""

    id: int
    subject: str
    version: int
    fingerprint: str
    digest: str
    text: str

    @staticmethod
    def of(published: LockedSchema | SchemaPublished) -> Entry:
        """A schema of the lock file, or one that a newer program published."""
        if isinstance(published, LockedSchema):
            number, definition = published.id, published.definition()
        else:
            number, definition = published.schema_id, json.loads(published.definition)
        return Entry(
            id=number,
            subject=published.subject,
            version=published.version,
            fingerprint=published.fingerprint,
            digest=text_digest(definition),
            text=json.dumps(definition, separators=(",", ":"), ensure_ascii=False),
        )

    @property
    def guid(self) -> str:
        """A name for the schema's text that is the same in every registry of this product."""
        return str(UUID(hex=self.digest[:32]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schema that somebody asks about. `definition` is what its JSON text says, `digest` stands for all of it."""

    definition: Any
    fingerprint: str
    digest: str

    @staticmethod
    def parse(text: str) -> Candidate:
        """Raises Unprocessable when the text is not an Avro schema."""
        try:
            definition = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise Unprocessable(f"schema: expected an Avro schema as JSON text: {error}", code=INVALID_SCHEMA) from None
        if deeper_than(definition, _DEEPEST):
            raise Unprocessable(
                f"schema: expected a schema at most {_DEEPEST} lists and objects deep", code=INVALID_SCHEMA
            )
        try:
            return Candidate(definition=definition, fingerprint=fingerprint(definition), digest=text_digest(definition))
        except Exception as error:
            # Whatever a parser says of a stranger's text, it is the text that is at fault.
            why = f"{type(error).__name__}: {error}"[:300]
            raise Unprocessable(f"schema: expected a valid Avro schema: {why}", code=INVALID_SCHEMA) from error


class Catalogue:
    """The published schemas of one installation; `namespace` begins the names of its topics."""

    def __init__(self, published: Iterable[LockedSchema], *, namespace: str = "") -> None:
        self.namespace = namespace
        self._by_id: dict[int, Entry] = {}
        self._by_subject: dict[str, list[Entry]] = {}
        for schema in published:
            self._add(Entry.of(schema))

    def learn(self, published: SchemaPublished) -> bool:
        """Show a schema of newer programs as well; False when its id was known, which then keeps its meaning.

        It was learnt by the codec before, which refuses what no release can have published. Under its subject it is
        shown only when nothing else is that version there.
        """
        if published.schema_id in self._by_id:
            return False
        self._add(Entry.of(published))
        return True

    def _add(self, entry: Entry) -> None:
        self._by_id[entry.id] = entry
        known = self._by_subject.get(entry.subject, [])
        if entry.version not in {e.version for e in known}:
            self._by_subject[entry.subject] = sorted([*known, entry], key=lambda e: e.version)

    def subjects(self, pools: Iterable[str] = ()) -> list[str]:
        """Every subject by its full name, in order; `pools` are those that are known besides the default one."""
        queues = (subject_of(requests_topic(pool)) for pool in pools)
        return sorted(prefixed(self.namespace, name) for name in {*self._by_subject, *queues})

    def versions(self, subject: str) -> Sequence[Entry]:
        """The schemas of a subject, oldest first. Raises NotFound."""
        name = without_context(subject)
        start = prefixed(self.namespace, "")
        found = self._by_subject.get(_base(name[len(start) :])) if name.startswith(start) else None
        if found is None:
            raise NotFound(f"Subject '{subject[:200]}' not found; GET /registry/subjects lists them", code=NO_SUBJECT)
        return found

    def version(self, subject: str, version: str) -> Entry:
        """The schema of a subject by its version's number or "latest". Raises NotFound, Unprocessable."""
        known = self.versions(subject)
        if version in _NEWEST:
            return known[-1]
        number = int(version) if version.isascii() and version.isdecimal() and len(version) <= 10 else 0
        if not 0 < number < 2**31:
            raise Unprocessable(
                f"version: expected a number from 1 to 2147483647 or 'latest', found '{version[:40]}'",
                code=INVALID_VERSION,
            )
        for entry in known:
            if entry.version == number:
                return entry
        there = ", ".join(str(e.version) for e in known)
        raise NotFound(f"Version {number} not found; subject '{subject[:200]}' has {there}", code=NO_VERSION)

    def by_id(self, text: str) -> Entry:
        """The schema with this id on the wire. Raises NotFound."""
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else -1
        return _found(self._by_id.get(number), f"Schema {text[:40]} not found; ids are those of GET /registry/schemas")

    def by_guid(self, text: str) -> Entry:
        """The schema with this guid. Raises NotFound."""
        found = next((e for e in self._by_id.values() if e.guid == text.lower()), None)
        return _found(found, f"Schema {text[:40]} not found")

    def matching(self, subject: str, candidate: Candidate) -> Entry:
        """The schema of a subject that writes the same bytes as this one; among several the one with the same text,
        else the newest. Raises NotFound."""
        same = [e for e in self.versions(subject) if e.fingerprint == candidate.fingerprint]
        exact = [e for e in same if e.digest == candidate.digest]
        fitting = exact or same
        return _found(
            fitting[-1] if fitting else None,
            f"Schema not found under subject '{subject[:200]}': no version of it writes the same bytes",
        )

    def newest_id(self) -> int:
        """The highest id in use."""
        return max(self._by_id)

    def subjects_of(self, entry: Entry, pools: Iterable[str] = ()) -> list[str]:
        """The subjects a schema is a version of."""
        return [s for s in self.subjects(pools) if entry in self.versions(s)]


def without_context(name: str) -> str:
    """A subject, or the beginning of one, without the mark of the default or of any context."""
    return _CONTEXT.sub("", name)


def _base(name: str) -> str:
    """The subject under which the lock file has the schemas of this one."""
    pool = name[len(_QUEUE_START) : -len(_QUEUE_END)]
    is_queue = name.startswith(_QUEUE_START) and name.endswith(_QUEUE_END) and _POOL.fullmatch(pool)
    return _DEFAULT_QUEUE if is_queue else name


def _found(entry: Entry | None, message: str) -> Entry:
    if entry is None:
        raise NotFound(message, code=NO_SCHEMA)
    return entry
