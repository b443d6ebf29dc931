"""Large inputs and outputs at the worker: inputs are fetched before a request joins a batch, outputs kept before the
result is recorded.

What goes wrong with a blob belongs to its request alone, and whatever waits for the store waits alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from gpu_worker.endings import Ended, as_failed
from gpu_worker.errors import InputAltered, InputLost, ItemError, MachineError
from infra.blobs import ClaimCheck
from infra.room import Room
from infra.s3 import StoreUnavailable
from schemas.claims import LARGEST_BYTES, BlobAltered, BlobLost, blob_bytes, data_bytes
from schemas.records import InferenceRequested
from schemas.tensors import Tensor
from schemas.topics import RESULTS

#: Inputs that were fetched and have not run yet. One request, which may have LARGEST_BYTES, always fits.
ROOM_BYTES = 128 * 1024 * 1024
#: How long a result that fits the log waits to be kept beside it, before it goes onto it.
KEEP_WITHIN_S = 5.0


class LargeTensors:
    """The worker's Claims, and what its Outcomes need of them."""

    def __init__(self, check: ClaimCheck, *, room_bytes: int = ROOM_BYTES) -> None:
        self._check = check
        self._room = Room(room_bytes)

    async def redeem(self, request: InferenceRequested, *, within_s: float) -> InferenceRequested:
        """See Claims."""
        size_bytes = blob_bytes(request.inputs)
        if size_bytes > LARGEST_BYTES:
            raise ItemError(f"the inputs take {size_bytes} bytes, the most is {LARGEST_BYTES}; send fewer items")
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + within_s
        try:
            await asyncio.wait_for(self._room.take(size_bytes), max(0.0, within_s))
        except asyncio.TimeoutError as error:
            raise MachineError(f"no room for {size_bytes} bytes of inputs within {within_s:.1f} s") from error
        try:
            inputs = await self._redeem(request, ends_s - loop.time())
        except BaseException:
            self._room.give_back(size_bytes)
            raise
        return replace(request, inputs=inputs)

    def release(self, request: InferenceRequested) -> None:
        """See Claims."""
        self._room.give_back(blob_bytes(request.inputs))

    def is_large(self, ended: Ended) -> bool:
        """Whether the result carries more than the log should; one that is on the log already stays as it is."""
        return ended.logged is None and self._check.is_due(ended.finished.outputs)

    async def hand_in(self, ended: Ended, *, left_s: float) -> Ended:
        """The end with large outputs kept beside the log, or as it is while the store is away.

        `left_s` is until its deadline. A result above LARGEST_BYTES becomes a failure.
        """
        outputs = ended.finished.outputs
        size_bytes = data_bytes(outputs)
        if size_bytes > LARGEST_BYTES:
            words = f"the outputs take {size_bytes} bytes, the most is {LARGEST_BYTES}; send fewer items"
            return as_failed(ended, code="result_too_large", message=words)
        try:
            # What the log does not take anyway has nothing to gain by not waiting.
            within_s = left_s if size_bytes > RESULTS.max_message_bytes else min(left_s, KEEP_WITHIN_S)
            carried = await self._check.hand_in(outputs, ended.finished.request_id, within_s=within_s)
        except StoreUnavailable:  # logged and counted there
            return ended
        return replace(ended, finished=replace(ended.finished, outputs=carried))

    async def _redeem(self, request: InferenceRequested, within_s: float) -> tuple[Tensor, ...]:
        try:
            return await self._check.redeem(request.inputs, request.request_id, within_s=within_s)
        except BlobLost as error:
            raise InputLost(f"an input is lost; send the request again: {error}") from error
        except BlobAltered as error:
            raise InputAltered(f"an input is not the one that was sent; send the request again: {error}") from error
        except StoreUnavailable as error:
            raise MachineError(str(error)) from error
