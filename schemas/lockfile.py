"""Which number on the wire means which schema: the checked-in, append-only list of schema ids.

An id, once used, means the same schema for ever, because records on the log outlive the code. No registry is asked
at run time; `schemas.lock.json` travels with the code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any


class LockfileError(ValueError):
    """The lock file and the schema files do not agree; the message names the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedSchema:
    """One published schema: `id` on the wire, the `version`-th of `record`, as stored in `file`."""

    id: int
    subject: str
    version: int
    record: str
    fingerprint: str
    file: str

    def definition(self) -> dict[str, Any]:
        """The Avro schema as parsed JSON."""
        text = files("schemas").joinpath("avro").joinpath(self.file).read_text(encoding="utf-8")
        parsed: dict[str, Any] = json.loads(text)
        return parsed


@lru_cache(maxsize=1)
def locked_schemas() -> tuple[LockedSchema, ...]:
    """Every published schema by ascending id. Raises LockfileError when an id or a record version repeats."""
    entries = json.loads(files("schemas").joinpath("schemas.lock.json").read_text(encoding="utf-8"))
    schemas = tuple(LockedSchema(**entry) for entry in entries)
    ids = [s.id for s in schemas]
    if ids != sorted(set(ids)):
        raise LockfileError(f"schemas.lock.json: ids must be unique and ascending, found {ids}")
    versions = [(s.record, s.version) for s in schemas]
    if len(versions) != len(set(versions)):
        raise LockfileError("schemas.lock.json: a record has the same version twice")
    return schemas


def latest(record: str) -> LockedSchema:
    """The newest published schema of a record's full name. Raises LockfileError when there is none."""
    found = [s for s in locked_schemas() if s.record == record]
    if not found:
        raise LockfileError(f"schemas.lock.json: no schema is published for {record}")
    return max(found, key=lambda s: s.version)
