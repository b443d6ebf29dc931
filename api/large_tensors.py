"""Large inputs and outputs at the gateway: inputs are kept in S3 before their request is published, outputs fetched
before their caller is answered.

While S3 is away a request carries its inputs itself, if the log takes it; a result that lies there cannot be told. Of
large results no more are answered at once than there is room for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from api.errors import AnswerLost, ResultLost, TooLarge
from infra.blobs import ClaimCheck
from infra.room import Room
from infra.s3 import StoreUnavailable
from schemas.claims import LARGEST_BYTES, BlobAltered, BlobLost, blob_bytes, data_bytes
from schemas.records import InferenceFinished, InferenceRequested

#: How much of its time a request may spend on having its inputs kept, before it carries them itself.
_SHARE = 0.25
#: Outputs of large results from when they are fetched until they are written. One of LARGEST_BYTES always fits.
ROOM_BYTES = 128 * 1024 * 1024
_AGAIN = "without an Idempotency-Key, sending the call again may make another request, which is billed as one"


class LargeTensors:
    """What of requests and results does not go over the log."""

    def __init__(self, check: ClaimCheck, *, room_bytes: int = ROOM_BYTES) -> None:
        self._check = check
        self._room = Room(room_bytes)

    async def hand_in(self, record: InferenceRequested) -> InferenceRequested:
        """The record as it is to be published: as it is when it is small enough, or while S3 is away.

        Raises TooLarge for more than LARGEST_BYTES.
        """
        if not self._check.is_due(record.inputs):
            return record
        size_bytes = data_bytes(record.inputs)
        if size_bytes > LARGEST_BYTES:
            raise TooLarge(f"the inputs take {size_bytes} bytes, the most is {LARGEST_BYTES}; send fewer items")
        within_s = _SHARE * (record.deadline_at - record.occurred_at).total_seconds()
        try:
            inputs = await self._check.hand_in(record.inputs, record.request_id, within_s=within_s)
        except StoreUnavailable:  # logged and counted there
            return record
        return replace(record, inputs=inputs)

    def is_large(self, record: InferenceRequested) -> bool:
        """Whether a record carries itself what should lie in S3."""
        return self._check.is_due(record.inputs)

    def is_large_answer(self, whole: InferenceFinished) -> bool:
        """Whether a result with all its outputs is one that should be told in pieces."""
        return self._check.is_due(whole.outputs)

    @asynccontextmanager
    async def whole(self, finished: InferenceFinished, *, within_s: float) -> AsyncIterator[InferenceFinished]:
        """The result with all its outputs, which have room until the end of the block: tell it inside.

        Raises ResultLost when they are gone or not the ones that were made, AnswerLost after `within_s`.
        """
        beside_bytes = blob_bytes(finished.outputs)
        if not beside_bytes and not self.is_large_answer(finished):
            yield finished
            return
        if beside_bytes > LARGEST_BYTES:  # it would never have room
            words = f"{_ran(finished)} its output is not the one it made: {beside_bytes} bytes, more than any may take"
            raise ResultLost(f"{words}; {_AGAIN}", code="output_altered")
        size_bytes = data_bytes(finished.outputs) + beside_bytes
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + within_s
        try:
            await asyncio.wait_for(self._room.take(size_bytes), max(0.0, within_s))
        except asyncio.TimeoutError as error:
            words = f"{_ran(finished)} other large answers took the room for its {size_bytes} bytes until its deadline"
            raise AnswerLost(f"{words}; {_AGAIN}", code="outputs_crowded") from error
        try:
            yield await self._redeem(finished, within_s=ends_s - loop.time())
        finally:
            self._room.give_back(size_bytes)

    async def _redeem(self, finished: InferenceFinished, *, within_s: float) -> InferenceFinished:
        if not any(t.blob for t in finished.outputs):
            return finished
        try:
            outputs = await self._check.redeem(finished.outputs, finished.request_id, within_s=within_s)
        except BlobLost as error:
            raise ResultLost(f"{_ran(finished)} its output is lost: {error}; {_AGAIN}") from error
        except BlobAltered as error:
            words = f"{_ran(finished)} its output is not the one it made: {error}; {_AGAIN}"
            raise ResultLost(words, code="output_altered") from error
        except StoreUnavailable as error:
            words = f"{_ran(finished)} its outputs lie in S3, which does not answer: {error}; {_AGAIN}"
            raise AnswerLost(words, code="outputs_away") from error
        return replace(finished, outputs=outputs)


def _ran(finished: InferenceFinished) -> str:
    return f"request {finished.request_id} has run and is billed, but"
