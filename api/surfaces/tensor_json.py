"""Tensors as the JSON of the Open Inference Protocol, checked against a version's signature.

Every refusal names the tensor, what was expected and what was found. Data may be flat or nested like its shape.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from api.errors import BadInput
from api.surfaces.http import json_kind
from schemas.manifest import Manifest, TensorSpec
from schemas.tensors import BYTES, ELEMENT_SIZE_BYTES, Tensor, TensorError

#: Items one request may hold, as with OpenAI; the worker runs them in as many batches as the model wants.
MAX_ITEMS = 2048

_FORMATS = {
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_BOOLS, _INTS, _FLOATS, _TEXTS = ({bool}, {int}, {int, float}, {str})
_EXPECTED = {
    bool: "true or false",
    int: "whole numbers",
    float: "numbers",
    str: "strings",
}


def parse_inputs(entries: Any, manifest: Manifest) -> tuple[tuple[Tensor, ...], int]:
    """The inputs of a request in the order of the signature, and the number of items (their common first dimension).

    Raises BadInput naming the tensor at fault.
    """
    if not isinstance(entries, list):
        raise BadInput(f"inputs: expected an array of tensors, found {json_kind(entries)}", param="inputs")
    by_name: dict[str, dict[str, Any]] = {}
    for at, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise BadInput(f"inputs[{at}]: expected an object, found {json_kind(entry)}", param=f"inputs[{at}]")
        name = entry.get("name")
        if not isinstance(name, str):
            raise BadInput(f"inputs[{at}].name: expected a string, found {json_kind(name)}", param=f"inputs[{at}].name")
        if name in by_name:
            raise BadInput(f"input '{_shown(name)}': given twice", param=f"inputs[{at}].name")
        by_name[name] = entry
    expected = {spec.name for spec in manifest.inputs}
    unknown = [name for name in by_name if name not in expected]
    if unknown:
        raise BadInput(
            f"input '{_shown(unknown[0])}': unknown; the model takes {_signature(manifest.inputs)}", param="inputs"
        )
    tensors = []
    for spec in manifest.inputs:
        if spec.name not in by_name:
            raise BadInput(
                f"input '{spec.name}': missing; the model takes {_signature(manifest.inputs)}", param="inputs"
            )
        tensors.append(parse_tensor(by_name[spec.name], spec))
    return tuple(tensors), item_count(tensors)


def item_count(tensors: Sequence[Tensor]) -> int:
    """The common first dimension. Raises BadInput when it is not common, is 0, or is above MAX_ITEMS."""
    items = tensors[0].item_count
    for t in tensors:
        if t.item_count != items:
            raise BadInput(
                f"input '{t.name}': holds {t.item_count} items, expected {items} like input '{tensors[0].name}'",
                param=t.name,
            )
    if not 1 <= items <= MAX_ITEMS:
        raise BadInput(
            f"input '{tensors[0].name}': holds {items} items, expected 1 to {MAX_ITEMS} per request",
            param=tensors[0].name,
        )
    return items


def parse_tensor(entry: Mapping[str, Any], spec: TensorSpec) -> Tensor:
    """One tensor object `{"name", "shape", "datatype", "data"}` as the signature wants it. Raises BadInput."""
    name = spec.name
    datatype = entry.get("datatype")
    if datatype != spec.datatype:
        found = f"'{_shown(datatype)}'" if isinstance(datatype, str) else json_kind(datatype)
        raise _bad(name, f"datatype: expected '{spec.datatype}', found {found}")
    shape = _shape(entry.get("shape"), spec)
    data = entry.get("data")
    if not isinstance(data, list):
        raise _bad(name, f"data: expected an array, found {json_kind(data)}")
    count = math.prod(shape)
    flat = data if len(data) == count and not (data and type(data[0]) is list) else _flatten(name, data, shape)
    if len(flat) != count:
        raise _bad(name, f"data: expected {count} elements for shape {list(shape)}, found {len(flat)}")
    try:
        return Tensor(name=name, datatype=datatype, shape=shape, data=_pack(name, datatype, flat))
    except TensorError as error:
        raise BadInput(str(error), param=name) from error


def render_tensor(tensor: Tensor) -> dict[str, Any]:
    """A tensor as a JSON object with flat, row-major data. NaN and infinities become null when it is written.

    Raises UnicodeDecodeError for BYTES elements that are not text: JSON cannot carry them.
    """
    data: Sequence[Any]
    if tensor.datatype == BYTES:
        data = [e.decode() for e in tensor.elements()]
    else:
        data = numbers(tensor.datatype, tensor.data)
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": data}


def numbers(datatype: str, data: bytes | memoryview) -> Sequence[Any]:
    """Elements of any datatype but BYTES as values of JSON."""
    if datatype == "BOOL":
        return [b != 0 for b in data]
    return struct.unpack(f"<{len(data) // ELEMENT_SIZE_BYTES[datatype]}{_FORMATS[datatype]}", data)


def _shape(found: Any, spec: TensorSpec) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(d) is int and d >= 0 for d in found):
        raise _bad(spec.name, "shape: expected an array of whole numbers, each at least 0")
    if len(found) != len(spec.shape) or any(w not in (-1, d) for d, w in zip(found, spec.shape, strict=True)):
        raise _bad(
            spec.name,
            f"shape: expected {list(spec.shape)}{' (-1: any length)' if -1 in spec.shape else ''}, "
            f"found {found if len(found) <= 16 else f'{len(found)} dimensions'}",
        )
    return tuple(found)


def _flatten(name: str, data: list[Any], shape: Sequence[int]) -> list[Any]:
    """Nested data as a flat list, its nesting checked against the shape; flat data stays as it is."""
    if not any(type(part) is list for part in data):
        return data
    level = [data]
    for depth, size in enumerate(shape):
        for part in level:
            if type(part) is not list or len(part) != size:
                found = f"an array of {len(part)}" if type(part) is list else json_kind(part)
                raise _bad(
                    name, f"data: expected arrays of {size} at depth {depth + 1} for shape {list(shape)}, found {found}"
                )
        level = list(chain.from_iterable(level))
    return level


def _pack(name: str, datatype: str, flat: list[Any]) -> bytes:
    types = set(map(type, flat))
    if datatype == BYTES:
        _require(name, datatype, flat, types, _TEXTS, str)
        encoded = [text.encode() for text in flat]
        return b"".join(chain.from_iterable((struct.pack("<I", len(e)), e) for e in encoded))
    if datatype == "BOOL":
        _require(name, datatype, flat, types, _BOOLS, bool)
        return bytes(flat)
    if datatype.startswith("FP"):
        _require(name, datatype, flat, types, _FLOATS, float)
    else:
        _require(name, datatype, flat, types, _INTS, int)
    try:
        return struct.pack(f"<{len(flat)}{_FORMATS[datatype]}", *flat)
    except (struct.error, OverflowError) as error:
        raise _bad(name, f"data: an element does not fit {datatype} ({error})") from error


def _require(name: str, datatype: str, flat: list[Any], types: set[type], allowed: set[Any], word: type) -> None:
    if types <= allowed:
        return
    at = next(i for i, value in enumerate(flat) if type(value) not in allowed)
    raise _bad(name, f"data[{at}]: expected {_EXPECTED[word]} for {datatype}, found {json_kind(flat[at])}")


def _bad(name: str, words: str) -> BadInput:
    return BadInput(f"input '{name}': {words}", code="invalid_tensor", param=name)


def _signature(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"'{s.name}' {s.datatype} {list(s.shape)}" for s in specs)


def _shown(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "…"
