"""Large inputs and outputs at the gateway: inputs are kept in S3 before their request is published, outputs fetched
before their caller is answered.

While S3 is away a request carries its inputs itself, if the log takes it; a result that lies there cannot be told.
"""

from __future__ import annotations

from dataclasses import replace

from api.errors import AnswerLost, ResultLost, TooLarge
from infra.blobs import ClaimCheck
from infra.s3 import StoreUnavailable
from schemas.claims import LARGEST_BYTES, BlobAltered, BlobLost, data_bytes
from schemas.records import InferenceFinished, InferenceRequested

#: How much of its time a request may spend on having its inputs kept, before it carries them itself.
_SHARE = 0.25
_AGAIN = "sending the call again makes another request, which is billed as one"


class LargeTensors:
    """What of requests and results does not go over the log."""

    def __init__(self, check: ClaimCheck) -> None:
        self._check = check

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

    async def redeem(self, finished: InferenceFinished, *, within_s: float) -> InferenceFinished:
        """The result with all its outputs.

        Raises ResultLost when they are gone or not the ones that were made, AnswerLost after `within_s`.
        """
        if not any(t.blob for t in finished.outputs):
            return finished
        ran = f"request {finished.request_id} has run and is billed, but"
        try:
            outputs = await self._check.redeem(finished.outputs, within_s=within_s)
        except BlobLost as error:
            raise ResultLost(f"{ran} its output is lost: {error}; {_AGAIN}") from error
        except BlobAltered as error:
            words = f"{ran} its output is not the one it made: {error}; {_AGAIN}"
            raise ResultLost(words, code="output_altered") from error
        except StoreUnavailable as error:
            words = f"{ran} its outputs lie in S3, which does not answer: {error}; {_AGAIN}"
            raise AnswerLost(words, code="outputs_away") from error
        return replace(finished, outputs=outputs)
