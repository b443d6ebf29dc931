"""What a worker must find out about requests that it takes over, because an earlier owner may have ended some. Pure.

A result stands once it is on the log, before its usage and its offset are. Whoever takes over a partition therefore
looks for the first result of every record that an earlier owner may have touched, before it runs or expires any.
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


def inherited(committed: int | None, *, begin: int, end: int, reach: int) -> range:
    """The offsets of a partition that an earlier owner may have ended without committing them.

    `committed` is the group's position, None when there is none; `begin` and `end` are the log's. No owner ends a
    record `reach` or more past its position, so that ids of a long queue need not all be remembered.
    """
    start = max(begin, begin if committed is None else committed)
    return range(start, max(start, min(end, start + reach)))


class FirstResults:
    """First results of the requests that are looked for; holds one id per request, and the results that were found.

    Give it all inherited requests first, then every result in the order of the log. Then, when some are `unlearnt`,
    learn the schemas that there are and have it `look_again`.
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
