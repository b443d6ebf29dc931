"""A ledger that its group refuses says so each minute, and ends when it was refused for as long as a stall may last.

Without partitions it has nothing to stall at as long as another member reads them all, and would stay up for ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from infra.kafka import KafkaError
from infra.kafka_group import remedy

log = logging.getLogger(__name__)

#: How often the group's answer is asked for, and how often a refusal is said.
LOOK_S: Final = 1.0
SAY_S: Final = 60.0


class Refused(RuntimeError):
    """The group did not take this ledger in for too long; the message says why, and what to do."""


class Membership:
    """How a ledger stands with its group. A member that has no partition because others have them all is none refused.

    `patience_s` is how long it may be refused; `refused` says why it is now, or is None.
    """

    def __init__(self, *, group: str, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._patience_s = patience_s
        self._clock = clock
        self._since_s = 0.0
        self._said_s = 0.0
        self.refused: str | None = None

    def heard(self, error: KafkaError | None, *, member: bool) -> None:
        """What the group answered since the last time: an error, a membership, or nothing yet. Raises Refused."""
        now_s = self._clock()
        if error is not None:
            is_first = self.refused is None
            self.refused = f"the group {self._group} does not take this ledger in ({_name(error)}): {remedy(error)}"
            if is_first:
                self._since_s = now_s
            if is_first or now_s - self._said_s >= SAY_S:
                self._said_s = now_s
                log.error("%s. It tries again; if nothing changes it ends in %.0f s", self.refused, self._left_s(now_s))
        elif member and self.refused is not None:
            log.info("the group %s has taken this ledger in", self._group)
            self.refused = None
        if self.refused is not None and self._left_s(now_s) <= 0:
            raise Refused(f"{self.refused}. It was refused for {now_s - self._since_s:.0f} s")

    def _left_s(self, now_s: float) -> float:
        return self._since_s + self._patience_s - now_s


def _name(error: KafkaError) -> str:
    return str(error) or type(error).__name__
