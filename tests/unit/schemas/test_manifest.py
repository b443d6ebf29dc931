from __future__ import annotations

from dataclasses import replace

import pytest

from schemas.manifest import ArtifactFile, Manifest, ManifestError, TensorSpec
from schemas.records import Task


def manifest() -> Manifest:
    return Manifest(
        task=Task.TENSORS,
        layout="safetensors",
        architecture="mlp",
        architecture_args={"inputs": 64},
        files=(ArtifactFile(name="weights.safetensors", sha256="0" * 64, size_bytes=10),),
        inputs=(TensorSpec(name="pixels", datatype="FP32", shape=(-1, 64)),),
        outputs=(TensorSpec(name="logits", datatype="FP32", shape=(-1, 10)),),
        max_batch_items=64,
        max_length=0,
        torch_version="2.15.0",
        producer="tests",
    )


def test_a_manifest_comes_back_equal_and_its_version_is_its_digest() -> None:
    m = manifest()
    assert Manifest.from_bytes(m.to_bytes(), version=m.version) == m


def test_any_change_is_another_version() -> None:
    m = manifest()
    assert replace(m, producer="someone else").version != m.version
    assert replace(m, files=(replace(m.files[0], sha256="1" * 64),)).version != m.version


def test_bytes_that_are_not_the_versions_are_refused() -> None:
    m = manifest()
    with pytest.raises(ManifestError, match="has sha256"):
        Manifest.from_bytes(m.to_bytes() + b" ", version=m.version)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format":1}', b'{"format":2}'])
def test_malformed_manifests_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(data)
