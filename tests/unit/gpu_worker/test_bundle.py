"""A bundle's mistakes are told by field; a good one becomes the same version wherever it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.bundle import BundleError, read_bundle

GOOD: dict[str, Any] = {
    "task": "TENSORS",
    "layout": "safetensors",
    "architecture": "mlp",
    "architecture_args": {"inputs": 2},
    "files": ["weights.safetensors"],
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}],
    "max_batch_items": 8,
    "max_length": 0,
    "torch_version": "2",
    "producer": "a test",
}


def bundle(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "weights.safetensors").write_bytes(b"w")
    document = {k: v for k, v in {**GOOD, **changes}.items() if v is not ...}
    (folder / "model.json").write_text(json.dumps(document))
    return folder


def test_the_same_files_make_the_same_version(tmp_path: Path) -> None:
    first, second = read_bundle(bundle(tmp_path / "a")), read_bundle(bundle(tmp_path / "b"))
    assert first.version == second.version
    (tmp_path / "b" / "weights.safetensors").write_bytes(b"v")
    assert read_bundle(tmp_path / "b").version != first.version


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "SPEECH"}, "task: expected TENSORS or EMBEDDINGS, found 'SPEECH'"),
        ({"layout": "pickle"}, "layout: expected one of safetensors, pt2, found 'pickle'"),
        ({"producer": ...}, "producer: expected str, found nothing"),
        ({"max_batch_items": 0}, "max_batch_items: expected 1 to 65536, found 0"),
        ({"max_batch_items": True}, "max_batch_items: expected int, found True"),
        ({"colour": "red"}, "colour: not a field of model.json"),
        ({"files": []}, "files: expected at least one name"),
        ({"files": ["../x"]}, "files: expected plain names of files in the bundle, found '../x'"),
        ({"files": ["gone"]}, "gone: No such file"),
        ({"architecture_args": {"inputs": "2"}}, "architecture_args.inputs: expected int, found '2'"),
        ({"inputs": []}, "inputs: expected at least one tensor"),
        ({"inputs": [{"name": "x", "datatype": "FP8", "shape": [-1]}]}, r"inputs\[0\].datatype"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [4, 2]}]}, "the first dimension counts items"),
        ({"outputs": [{"name": "y", "shape": [-1]}]}, r"outputs\[0\]: expected name, datatype and shape"),
        ({"task": "EMBEDDINGS"}, "inputs: task EMBEDDINGS takes one input of BYTES"),
    ],
)
def test_each_mistake_names_its_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        read_bundle(bundle(tmp_path, **changes))


def test_a_folder_without_a_description_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"expected a bundle folder with model\.json"):
        read_bundle(tmp_path)
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(BundleError, match="not JSON"):
        read_bundle(tmp_path)


TEXT = {"name": "text", "datatype": "BYTES", "shape": [-1]}
EMBEDDING = {"name": "embedding", "datatype": "FP32", "shape": [-1, 3]}


def embeddings_bundle(folder: Path, **changes: Any) -> Path:
    fields = {"task": "EMBEDDINGS", "inputs": [TEXT], "outputs": [EMBEDDING], "max_length": 16}
    return bundle(folder, **{**fields, **changes})


def test_an_embeddings_bundle_may_have_further_outputs(tmp_path: Path) -> None:
    further = {"name": "score", "datatype": "INT64", "shape": [-1]}
    assert len(read_bundle(embeddings_bundle(tmp_path, outputs=[EMBEDDING, further])).outputs) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": [{**TEXT, "datatype": "FP32"}]}, "inputs: task EMBEDDINGS takes one input of BYTES"),
        ({"inputs": [{**TEXT, "shape": [-1, 2]}]}, "inputs: task EMBEDDINGS takes one input of BYTES"),
        ({"inputs": [TEXT, {**TEXT, "name": "more"}]}, "inputs: task EMBEDDINGS takes one input of BYTES"),
        ({"outputs": [{**EMBEDDING, "datatype": "FP64"}]}, r"outputs: .*FP32 .* found FP64 with shape \[-1, 3\]"),
        ({"outputs": [{**EMBEDDING, "shape": [-1]}]}, r"outputs: .* found FP32 with shape \[-1\]"),
        ({"outputs": [{**EMBEDDING, "shape": [-1, -1]}]}, r"outputs: .* found FP32 with shape \[-1, -1\]"),
        ({"outputs": [{**EMBEDDING, "shape": [-1, 2, 3]}]}, r"outputs: .* found FP32 with shape \[-1, 2, 3\]"),
        ({"outputs": [TEXT, EMBEDDING]}, r"outputs: .* found BYTES with shape \[-1\]"),
        ({"max_length": 0}, "max_length: task EMBEDDINGS needs"),
    ],
)
def test_what_an_embeddings_call_could_not_answer_with_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        read_bundle(embeddings_bundle(tmp_path, **changes))
