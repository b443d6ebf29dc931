"""What a model version is: a small canonical document that names every byte of it; its sha256 is the version.

Two publishers with the same files and signature get the same version; any change of a byte gives another. Weights
are stored under `sha256/<version>/` and never overwritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from schemas.records import Task

MANIFEST_FILE = "manifest.json"
_FORMAT = 1


class ManifestError(ValueError):
    """A manifest that is malformed or is not the one its version names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output; in `shape`, -1 allows any length, and the first dimension counts items."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFile:
    """One file of a version, by name, digest (sha256, hex) and size."""

    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A model version.

    `layout` is "safetensors" (weights plus a registered `architecture` built from `architecture_args`) or "pt2" (a
    self-contained torch.export archive). `max_batch_items` bounds one run; `max_length` bounds tokens per text (0 for
    models that take no text).
    """

    task: Task
    layout: str
    architecture: str
    architecture_args: Mapping[str, int]
    files: tuple[ArtifactFile, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_items: int
    max_length: int
    torch_version: str
    producer: str

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, UTF-8."""
        document = {"format": _FORMAT, **asdict(self), "task": self.task.value}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def version(self) -> str:
        """sha256 of the canonical bytes, 64 hex digits."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @staticmethod
    def from_bytes(data: bytes, *, version: str | None = None) -> Manifest:
        """Parse a manifest; with `version`, first check that these bytes are the ones it names.

        Raises ManifestError when they are not, or when a field is missing or of the wrong kind.
        """
        if version is not None:
            found = hashlib.sha256(data).hexdigest()
            if found != version:
                raise ManifestError(f"version {version}: the manifest stored for it has sha256 {found}")
        try:
            return _parse(json.loads(data))
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"manifest: {type(error).__name__}: {error}") from error


def _parse(document: dict[str, Any]) -> Manifest:
    if document.pop("format") != _FORMAT:
        raise ManifestError(f"manifest: expected format {_FORMAT}")
    document["task"] = Task(document["task"])
    document["files"] = tuple(ArtifactFile(**f) for f in document["files"])
    for side in ("inputs", "outputs"):
        document[side] = tuple(
            TensorSpec(name=s["name"], datatype=s["datatype"], shape=tuple(s["shape"])) for s in document[side]
        )
    return Manifest(**document)


def artifact_prefix(version: str) -> str:
    """S3 key prefix of a version's files."""
    return f"sha256/{version}/"
