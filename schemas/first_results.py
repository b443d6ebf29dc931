"""Which record of the results topic is a request's result: of those with its id the first that decodes. Pure.

Workers that take over requests and gateways that look for results ask by the same rule as every proof, so that nobody
is told another end than the one that is billed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from schemas.codec import DecodeError, UnknownSchema, decode
from schemas.records import InferenceFinished

log = logging.getLogger(__name__)

#: A result is stamped by the host that ran the request, a request by the host that admitted it: their clocks may
#: differ by this much.
SLACK_MS = 5_000
_ID_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A request's end as it lies on the log; `framed` holds the very bytes."""

    finished: InferenceFinished
    framed: bytes


class FirstResults:
    """First results of the requests that are looked for; holds one id per request, and the results that were found.

    Tell it what to look for, then give it every result in the order of the log. When some are `unlearnt`, learn the
    schemas that there are and have it `look_again`.
    """

    def __init__(self) -> None:
        self._wanted: dict[bytes, int] = {}  # to the partitions of the id, a bit for each
        self._unlearnt: dict[bytes, list[bytes]] = {}  # from a request's first result that may decode later, in order
        self._earliest_ms: int | None = None
        self.found: dict[bytes, Recorded] = {}

    @property
    def since_ms(self) -> int | None:
        """No result that is looked for is stamped before this (Unix); None when nothing is looked for."""
        return None if self._earliest_ms is None else max(0, self._earliest_ms - SLACK_MS)

    @property
    def unlearnt(self) -> frozenset[int]:
        """The partitions of requests of which nothing can be told yet, since a result's schema id is unknown here."""
        bits = 0
        for key in self._unlearnt:
            bits |= self._wanted[key]
        return frozenset(partition for partition in range(bits.bit_length()) if bits >> partition & 1)

    def look_for(self, key: bytes | None, timestamp_ms: int, *, partition: int) -> None:
        """A request with the record key, timestamp and partition that it has on the log. Other keys are no requests."""
        if key is not None and len(key) == _ID_BYTES:
            self._wanted[key] = self._wanted.get(key, 0) | 1 << partition
            self._earliest_ms = timestamp_ms if self._earliest_ms is None else min(self._earliest_ms, timestamp_ms)

    def forget(self, key: bytes) -> None:
        """A request that nobody looks for any more; nothing of it is kept."""
        for kept in (self._wanted, self._unlearnt, self.found):
            kept.pop(key, None)

    def offer(self, key: bytes | None, value: bytes | None) -> None:
        """A record of the results topic; of those for one request the first that decodes counts, as in every proof."""
        if key is None or key not in self._wanted or key in self.found:
            return
        if key in self._unlearnt:
            self._unlearnt[key].append(value or b"")
            return
        try:
            self.found[key] = _recorded(key, value or b"")
        except UnknownSchema:
            self._unlearnt[key] = [value or b""]
        except DecodeError as error:
            _say(key, error)

    def look_again(self) -> None:
        """All schemas that there are have been learnt: a result that still does not decode does not count."""
        unlearnt, self._unlearnt = self._unlearnt, {}
        for key, values in unlearnt.items():
            for value in values:
                try:
                    self.found[key] = _recorded(key, value)
                    break
                except DecodeError as error:
                    _say(key, error)


def _recorded(key: bytes, framed: bytes) -> Recorded:
    """Raises DecodeError, also for another request's result under this key: it would be taken for this one's."""
    finished = decode(framed, InferenceFinished)
    if finished.request_id.bytes != key:
        raise DecodeError(f"InferenceFinished.request_id: expected the record's key, found {finished.request_id}")
    return Recorded(finished=finished, framed=framed)


def _say(key: bytes, error: DecodeError) -> None:
    log.error("a result does not decode", extra={"fields": {"key": key.hex(), "reason": error}})
