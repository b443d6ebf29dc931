"""The folder a model is published from: `model.json` beside its files, read into a manifest.

Every mistake names the field and what was expected; nothing here loads a model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from schemas.manifest import ArtifactFile, Manifest, TensorSpec
from schemas.records import Task
from schemas.tensors import BYTES, ELEMENT_SIZE_BYTES

DESCRIPTION_FILE = "model.json"
LAYOUTS = ("safetensors", "pt2")
_FIELDS = {
    "task": str,
    "layout": str,
    "architecture": str,
    "architecture_args": dict,
    "files": list,
    "inputs": list,
    "outputs": list,
    "max_batch_items": int,
    "max_length": int,
    "torch_version": str,
    "producer": str,
}


class BundleError(ValueError):
    """A bundle that cannot become a version; the message names the file or field and what was expected."""


def read_bundle(folder: Path) -> Manifest:
    """The manifest of a bundle: `model.json` with every file's size and digest. Raises BundleError."""
    path = folder / DESCRIPTION_FILE
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; expected a bundle folder with {DESCRIPTION_FILE}") from error
    except ValueError as error:
        raise BundleError(f"{path}: not JSON: {error}") from error
    _check_fields(document)
    manifest = Manifest(
        task=Task(document["task"]),
        layout=document["layout"],
        architecture=document["architecture"],
        architecture_args=document["architecture_args"],
        files=tuple(_file(folder, name) for name in sorted(set(document["files"]))),
        inputs=_specs("inputs", document["inputs"]),
        outputs=_specs("outputs", document["outputs"]),
        max_batch_items=document["max_batch_items"],
        max_length=document["max_length"],
        torch_version=document["torch_version"],
        producer=document["producer"],
    )
    if manifest.task is Task.EMBEDDINGS:
        _check_embeddings(manifest)
    return manifest


def _check_fields(document: Any) -> None:
    if not isinstance(document, dict):
        raise BundleError(f"{DESCRIPTION_FILE}: expected an object, found {type(document).__name__}")
    if unknown := sorted(set(document) - set(_FIELDS)):
        raise BundleError(f"{unknown[0]}: not a field of {DESCRIPTION_FILE}, expected {sorted(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if not isinstance(document.get(name), kind) or isinstance(document[name], bool):
            found = "nothing" if name not in document else repr(document[name])
            raise BundleError(f"{name}: expected {kind.__name__}, found {found}")
    if document["task"] not in (Task.TENSORS.value, Task.EMBEDDINGS.value):
        raise BundleError(f"task: expected TENSORS or EMBEDDINGS, found {document['task']!r}")
    if document["layout"] not in LAYOUTS:
        raise BundleError(f"layout: expected one of {', '.join(LAYOUTS)}, found {document['layout']!r}")
    for name, value in document["architecture_args"].items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise BundleError(f"architecture_args.{name}: expected int, found {value!r}")
    if not 1 <= document["max_batch_items"] <= 65536:
        raise BundleError(f"max_batch_items: expected 1 to 65536, found {document['max_batch_items']}")
    if not 0 <= document["max_length"] <= 1_000_000:
        raise BundleError(f"max_length: expected 0 to 1000000, found {document['max_length']}")
    if not document["files"]:
        raise BundleError("files: expected at least one name")


def _check_embeddings(manifest: Manifest) -> None:
    if [(s.datatype, s.shape) for s in manifest.inputs] != [(BYTES, (-1,))]:
        raise BundleError("inputs: task EMBEDDINGS takes one input of BYTES with shape [-1]")
    first = manifest.outputs[0]
    if first.datatype != "FP32" or len(first.shape) != 2 or first.shape[1] < 1:
        raise BundleError(
            "outputs: task EMBEDDINGS gives its embeddings as the first output, of FP32 with shape [-1, n] and n at "
            f"least 1, found {first.datatype} with shape {list(first.shape)}"
        )
    if not manifest.max_length:
        raise BundleError("max_length: task EMBEDDINGS needs the longest text in tokens, at least 1")


def _file(folder: Path, name: Any) -> ArtifactFile:
    if not isinstance(name, str) or Path(name).name != name or name in (DESCRIPTION_FILE, "manifest.json"):
        raise BundleError(f"files: expected plain names of files in the bundle, found {name!r}")
    digest = hashlib.sha256()
    size_bytes = 0
    try:
        with (folder / name).open("rb") as file:
            while chunk := file.read(1024 * 1024):
                digest.update(chunk)
                size_bytes += len(chunk)
    except OSError as error:
        raise BundleError(f"files: {folder / name}: {error.strerror}") from error
    return ArtifactFile(name=name, sha256=digest.hexdigest(), size_bytes=size_bytes)


def _specs(side: str, entries: list[Any]) -> tuple[TensorSpec, ...]:
    specs = []
    for i, entry in enumerate(entries):
        at = f"{side}[{i}]"
        if not isinstance(entry, dict) or set(entry) != {"name", "datatype", "shape"}:
            raise BundleError(f"{at}: expected name, datatype and shape, found {entry!r}")
        if not isinstance(entry["name"], str) or not entry["name"]:
            raise BundleError(f"{at}.name: expected a name, found {entry['name']!r}")
        if entry["datatype"] not in ELEMENT_SIZE_BYTES and entry["datatype"] != BYTES:
            raise BundleError(
                f"{at}.datatype: expected an Open Inference Protocol datatype, found {entry['datatype']!r}"
            )
        shape = entry["shape"]
        if not isinstance(shape, list) or not shape or any(type(d) is not int or d < -1 or d == 0 for d in shape):
            raise BundleError(f"{at}.shape: expected dimensions of 1 or more, or -1 for any, found {shape!r}")
        if shape[0] != -1:
            raise BundleError(f"{at}.shape: the first dimension counts items and must be -1, found {shape[0]}")
        specs.append(TensorSpec(name=entry["name"], datatype=entry["datatype"], shape=tuple(shape)))
    if not specs or len({s.name for s in specs}) != len(specs):
        raise BundleError(f"{side}: expected at least one tensor, each with its own name")
    return tuple(specs)
