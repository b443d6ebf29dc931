"""Whether a request makes sense, before anything of it is fetched, put in line, run or billed. Pure.

The gateway writes no request that is refused here. Whoever else may write to a topic of requests can say anything in
well-formed Avro, and what the fields say is run and billed: so nothing is believed that can be compared. What a field
may hold whatever the others say was checked when the record was read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpu_worker.errors import ItemError
from schemas.codec import DecodeError
from schemas.records import InferenceRequested, Task
from schemas.tensors import BYTES, ELEMENT_SIZE_BYTES, Tensor

#: Of each text that a result repeats, its usage has as key and value, or its headers carry.
LONGEST_TEXT_BYTES = 1024
#: Of each text that the ledger's tables have in one index together.
LONGEST_ID_BYTES = 200
#: From admission to deadline: six times what a gateway can be set to. An admission may lie as far ahead of this clock,
#: since another machine's wrote it, so a deadline lies at most twice this ahead. That bounds how long a request whose
#: version cannot be loaded holds back its partition's position, and the hours that it may be billed in.
LONGEST_LIFE_S = 3600.0
#: Eight times what a gateway lets through: nothing stops a run, so this bounds how long one request has the device.
MOST_ITEMS = 16_384
MOST_INPUTS = 256
#: A BYTES element is at least its length.
_LENGTH_BYTES = 4


def require_tellable(request: InferenceRequested) -> None:
    """Raise DecodeError for what is no request, since not even its failure could be told: no record would hold it."""
    texts = {name: getattr(request, name) for name in ("customer_id", "model", "version", "price_id", "reply_to")}
    for name, text in (*texts.items(), ("traceparent", request.traceparent or "")):
        # No text has fewer bytes than characters: a long one is not encoded to be measured.
        if len(text) > LONGEST_TEXT_BYTES or len(text.encode()) > LONGEST_TEXT_BYTES:
            raise DecodeError(
                f"InferenceRequested.{name}: expected at most {LONGEST_TEXT_BYTES} bytes, found {len(text)} characters"
            )


def require_sound(request: InferenceRequested, now_s: float) -> None:
    """Raise ItemError naming the first field that contradicts another, the clock (Unix seconds) or any use.

    What lies elsewhere is compared by its claim; it is compared again when it is fetched (`schemas.claims`).
    """
    _require_names(request)
    _require_times(request, now_s)
    if request.task not in (Task.TENSORS, Task.EMBEDDINGS):
        raise ItemError("task: expected TENSORS or EMBEDDINGS, found one that is unknown here")
    if not 1 <= len(request.inputs) <= MOST_INPUTS:
        raise ItemError(f"inputs: expected 1 to {MOST_INPUTS} tensors, found {len(request.inputs)}")
    if not 1 <= request.item_count <= MOST_ITEMS:
        raise ItemError(f"item_count: expected 1 to {MOST_ITEMS}, found {request.item_count}")
    for tensor in request.inputs:
        _require_tensor(tensor, request.item_count)
    if request.task is Task.EMBEDDINGS:
        _require_texts(request.inputs)


def _require_names(request: InferenceRequested) -> None:
    for name in ("customer_id", "model", "price_id"):
        text: str = getattr(request, name)
        # Postgres takes no NUL: what cannot be billed is not run.
        if not text or "\0" in text or len(text.encode()) > LONGEST_ID_BYTES:
            raise ItemError(f"{name}: expected 1 to {LONGEST_ID_BYTES} bytes without NUL, found {text[:100]!r}")


def _require_times(request: InferenceRequested, now_s: float) -> None:
    admitted_s, deadline_s = request.occurred_at.timestamp(), request.deadline_at.timestamp()
    if admitted_s - now_s > LONGEST_LIFE_S:
        raise ItemError(
            f"occurred_at: expected at most {LONGEST_LIFE_S:.0f} s after this worker's clock, "
            f"found {admitted_s - now_s:.0f} s"
        )
    if not 0 < deadline_s - admitted_s <= LONGEST_LIFE_S:
        raise ItemError(
            f"deadline_at: expected at most {LONGEST_LIFE_S:.0f} s after occurred_at, "
            f"found {deadline_s - admitted_s:.0f} s"
        )


def _require_tensor(tensor: Tensor, items: int) -> None:
    at = f"input {tensor.name[:100]!r}"
    size_bytes = ELEMENT_SIZE_BYTES.get(tensor.datatype)  # None: BYTES
    if not tensor.shape or tensor.item_count != items:
        found = tensor.item_count if tensor.shape else "a scalar"
        raise ItemError(f"item_count: expected what the inputs hold, found {items}, and in {at} {found}")
    count = math.prod(tensor.shape)
    if not count:
        raise ItemError(f"{at}: expected at least one element, found shape {list(tensor.shape)}")
    if tensor.blob is None:  # then a Tensor's data and shape agree
        return
    least = count * (size_bytes or _LENGTH_BYTES)
    if tensor.blob.size_bytes < least or (size_bytes and tensor.blob.size_bytes != least):
        raise ItemError(
            f"{at}: its blob is said to have {tensor.blob.size_bytes} bytes, shape {list(tensor.shape)} of "
            f"{tensor.datatype} needs {'' if size_bytes else 'at least '}{least}"
        )


def _require_texts(inputs: Sequence[Tensor]) -> None:
    if len(inputs) != 1 or inputs[0].datatype != BYTES or len(inputs[0].shape) != 1:
        found = ", ".join(f"{t.datatype} of {len(t.shape)} dimensions" for t in inputs[:4])
        raise ItemError(f"inputs: task EMBEDDINGS takes one list of texts (BYTES of 1 dimension), found {found}")
