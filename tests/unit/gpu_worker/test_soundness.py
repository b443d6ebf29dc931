"""Fields that contradict each other, the clock or any use: each kind is refused by name, and the honest are not."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from gpu_worker.errors import ItemError
from gpu_worker.soundness import LONGEST_ID_BYTES, LONGEST_LIFE_S, LONGEST_TEXT_BYTES, require_sound, require_tellable
from schemas.codec import DecodeError
from schemas.records import Task
from schemas.tensors import Blob, Tensor, bytes_tensor
from tests.factories import NOON, floats, requested

NOW_S = NOON.timestamp() + 1
#: The latest admission that is believed, and with it the latest deadline: both clocks may be wrong.
FARTHEST = NOON + timedelta(seconds=1 + LONGEST_LIFE_S)


def elsewhere(datatype: str, shape: tuple[int, ...], size_bytes: int) -> Tensor:
    blob = Blob(key="blobs/x", sha256="0" * 64, size_bytes=size_bytes)
    return Tensor(name="pixels", datatype=datatype, shape=shape, data=b"", blob=blob)


HONEST = [
    {},
    {"deadline_at": NOON + timedelta(seconds=600)},
    {"occurred_at": FARTHEST, "deadline_at": FARTHEST + timedelta(seconds=LONGEST_LIFE_S)},
    {"customer_id": "c" * LONGEST_ID_BYTES, "price_id": "é"},
    {"inputs": (floats("a", 1.0), bytes_tensor("b", [b""]))},
    {"inputs": (bytes_tensor("text", [b"one", b""]),), "item_count": 2, "task": Task.EMBEDDINGS},
    {"inputs": (elsewhere("FP32", (2, 64), 512),), "item_count": 2},
    {"inputs": (elsewhere("BYTES", (2,), 9),), "item_count": 2},
]
FALSE = [
    ({"item_count": 2}, "item_count: expected what the inputs hold, found 2, and in input 'pixels' 1"),
    ({"item_count": 2**31 - 1}, "item_count: expected 1 to"),
    ({"inputs": (floats("a", 1.0), bytes_tensor("b", [b"", b""]))}, "found 1, and in input 'b' 2"),
    ({"inputs": (Tensor(name="s", datatype="UINT8", shape=(), data=b"1"),)}, "in input 's' a scalar"),
    ({"inputs": ()}, "inputs: expected 1 to 256 tensors, found 0"),
    ({"inputs": (floats("a", 1.0),) * 257}, "inputs: expected 1 to 256 tensors, found 257"),
    ({"inputs": (Tensor(name="x", datatype="FP32", shape=(1, 0), data=b""),)}, r"found shape \[1, 0\]"),
    ({"inputs": (elsewhere("FP32", (1, 64), 255),)}, "said to have 255 bytes, .* needs 256"),
    ({"inputs": (elsewhere("FP32", (1, 64), 257),)}, "said to have 257 bytes, .* needs 256"),
    ({"inputs": (elsewhere("FP64", (1, *[2**62] * 20), 2**62),)}, "its blob is said to have"),
    ({"inputs": (elsewhere("BYTES", (1, 3), 11),)}, "said to have 11 bytes, .* needs at least 12"),
    ({"task": Task.EMBEDDINGS}, "task EMBEDDINGS takes one list of texts .*, found FP32 of 2 dimensions"),
    ({"task": Task.EMBEDDINGS, "inputs": (bytes_tensor("a", [b""]),) * 2}, "takes one list of texts"),
    ({"task": Task.UNKNOWN}, "task: expected TENSORS or EMBEDDINGS"),
    ({"customer_id": ""}, "customer_id: expected 1 to 200 bytes without NUL, found ''"),
    ({"customer_id": "a\0b"}, r"customer_id: .* found 'a\\x00b'"),
    ({"model": "é" * 101}, "model: expected 1 to 200 bytes"),
    ({"price_id": "\0"}, "price_id: "),
    ({"deadline_at": NOON + timedelta(seconds=LONGEST_LIFE_S + 1)}, "deadline_at: expected at most 3600 s .* 3601 s"),
    ({"deadline_at": NOON}, "deadline_at: "),
    ({"occurred_at": FARTHEST + timedelta(seconds=1)}, "occurred_at: expected at most 3600 s after .* found 3601 s"),
    ({"occurred_at": NOON - timedelta(days=1), "deadline_at": NOON + timedelta(seconds=9)}, "deadline_at: "),
]  # fmt: skip


@pytest.mark.parametrize("changes", HONEST)
def test_what_an_honest_writer_says_is_sound(changes: dict[str, Any]) -> None:
    require_sound(requested(**changes), NOW_S)
    require_tellable(requested(**changes))


@pytest.mark.parametrize(("changes", "words"), FALSE)
def test_what_contradicts_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ItemError, match=words) as refused:
        require_sound(requested(**changes), NOW_S)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("name", ["customer_id", "model", "version", "price_id", "reply_to", "traceparent"])
def test_what_no_result_could_repeat_is_no_request(name: str) -> None:
    require_tellable(replace(requested(), **{name: "x" * LONGEST_TEXT_BYTES}))
    for text in ("x" * (LONGEST_TEXT_BYTES + 1), "é" * (LONGEST_TEXT_BYTES // 2 + 1)):
        with pytest.raises(DecodeError, match=f"InferenceRequested.{name}: expected at most"):
            require_tellable(replace(requested(), **{name: text}))
