"""Which number on the wire means which schema: the checked-in, append-only list of schema ids.

An id, once used, means the same schema for ever, because records on the log outlive the code. No registry is asked
at run time; `schemas.lock.json` travels with the code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

LOCK_FILE = "schemas.lock.json"


class LockfileError(ValueError):
    """The lock file and the schema files do not agree; the message names the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedSchema:
    """One published schema: `id` on the wire, the `version`-th of `record`, as stored in `file`.

    `fingerprint` tells what bytes look like (CRC-64-AVRO, without docs and defaults), `sha256` what was published
    (`text_digest`, everything).
    """

    id: int
    subject: str
    version: int
    record: str
    fingerprint: str
    sha256: str
    file: str

    def definition(self) -> dict[str, Any]:
        """The Avro schema as parsed JSON."""
        text = files("schemas").joinpath("avro").joinpath(self.file).read_text(encoding="utf-8")
        parsed: dict[str, Any] = json.loads(text)
        return parsed


def text_digest(definition: dict[str, Any]) -> str:
    """sha256 of a schema with its docs and defaults, whatever its file's spacing and order of attributes."""
    text = json.dumps(definition, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_lock(text: str) -> tuple[LockedSchema, ...]:
    """The entries of a lock file by ascending id. Raises LockfileError when an id or a record's version repeats."""
    schemas = tuple(LockedSchema(**entry) for entry in json.loads(text))
    ids = [s.id for s in schemas]
    if ids != sorted(set(ids)):
        raise LockfileError(f"{LOCK_FILE}: ids must be unique and ascending, found {ids}")
    versions = [(s.record, s.version) for s in schemas]
    if len(versions) != len(set(versions)):
        raise LockfileError(f"{LOCK_FILE}: a record has the same version twice")
    return schemas


@lru_cache(maxsize=1)
def locked_schemas() -> tuple[LockedSchema, ...]:
    """Every published schema by ascending id. Raises LockfileError."""
    return parse_lock(files("schemas").joinpath(LOCK_FILE).read_text(encoding="utf-8"))


def versions_of(record: str, schemas: Sequence[LockedSchema] | None = None) -> list[LockedSchema]:
    """The published schemas of a record's full name, oldest first; empty when there are none."""
    found = [s for s in (locked_schemas() if schemas is None else schemas) if s.record == record]
    return sorted(found, key=lambda s: s.version)


def latest(record: str) -> LockedSchema:
    """The newest published schema of a record's full name. Raises LockfileError when there is none."""
    found = versions_of(record)
    if not found:
        raise LockfileError(f"{LOCK_FILE}: no schema is published for {record}")
    return found[-1]
