"""Whether tensors fit a version's signature. Values are no concern of it, only names, datatypes and shapes.

Checked before anything runs, so that a request that does not fit fails alone and its neighbours never notice.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.errors import ItemError
from schemas.manifest import TensorSpec
from schemas.records import Task
from schemas.tensors import Tensor


def check_task(expected: Task, found: Task) -> None:
    """Raise ItemError when a request asks for another task than the version's."""
    if found is not expected:
        raise ItemError(f"task: expected {expected.value}, which is the version's, found {found.value}")


def check_inputs(specs: Sequence[TensorSpec], inputs: Sequence[Tensor]) -> None:
    """Raise ItemError naming the tensor and what was expected when inputs do not fit the signature."""
    if len(inputs) != len(specs):
        raise ItemError(f"expected {len(specs)} inputs, found {len(inputs)}")
    for spec, tensor in zip(specs, inputs, strict=True):
        if tensor.name != spec.name or tensor.datatype != spec.datatype:
            raise ItemError(f"input '{tensor.name}' of {tensor.datatype}: expected '{spec.name}' of {spec.datatype}")
        if not fits(spec.shape, tensor.shape) or tensor.item_count != inputs[0].item_count or not tensor.item_count:
            raise ItemError(f"input '{spec.name}': expected shape {list(spec.shape)}, found {list(tensor.shape)}")


def fits(expected: Sequence[int], found: Sequence[int]) -> bool:
    """Whether a shape is one that `expected` allows, where -1 is any length."""
    return len(expected) == len(found) and all(e in (-1, f) for e, f in zip(expected, found, strict=True))
