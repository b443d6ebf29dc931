"""The model of benchmarks that run none: versions that differ in nothing but their hash."""

from __future__ import annotations

from schemas.manifest import Manifest, TensorSpec
from schemas.records import Task


def version_of_digits(number: int) -> Manifest:
    """The manifest of the version with this number: 64 pixels in, 10 numbers out."""
    return Manifest(
        task=Task.TENSORS,
        layout="safetensors",
        architecture="mlp",
        architecture_args={},
        files=(),
        inputs=(TensorSpec(name="pixels", datatype="FP32", shape=(-1, 64)),),
        outputs=(TensorSpec(name="logits", datatype="FP32", shape=(-1, 10)),),
        max_batch_items=32,
        max_length=0,
        torch_version="2",
        producer=f"bench {number}",
    )
