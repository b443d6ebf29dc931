"""What changed of keys and customers, read twice a second, so that no process goes on with what is no longer true.

A change is found by its transaction, not by a time: each read asks for the rows of all transactions that the snapshot
of the read before did not see. So one that was committed late, after others that began later, is found like any other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from api.access.keys import Keys, KeySourceAway
from api.access.revocations import RevokedKey

logger = logging.getLogger(__name__)

READ_EVERY_S = 0.5
#: When to say that it is behind: several reads have failed by then.
_BEHIND_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What transactions changed that an earlier snapshot had not seen, and the snapshot of this read.

    `server` is when the server was started: another one than before is a restart, or a copy that may know less.
    `revoked` are those of the changed keys that are revoked now.
    """

    snapshot: str
    server: datetime
    key_ids: Sequence[str] = ()
    customer_ids: Sequence[str] = ()
    revoked: Sequence[RevokedKey] = ()


class ChangeSource(Protocol):
    """Where keys and customers are stored."""

    async def changes(self, since: str | None) -> Changes:
        """What the snapshot `since` did not see; nothing for None. Raises KeySourceAway."""


class KeyFeed:
    """Tells `keys` what changed, and `revoked` which keys were revoked."""

    def __init__(
        self,
        source: ChangeSource,
        keys: Keys,
        *,
        revoked: Callable[[Sequence[RevokedKey]], None] = lambda revoked: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._keys = keys
        self._revoked = revoked
        self._clock = clock
        self._snapshot: str | None = None
        self._server: datetime | None = None
        self._read_s = float("-inf")
        self._why = "not read yet"

    def trouble(self, *, within_s: float = _BEHIND_S) -> str | None:
        """Why changes of keys are not known, None when they were read within `within_s`."""
        if self._clock() - self._read_s <= within_s:
            return None
        return f"changes of keys are not read: {self._why}"

    async def read(self) -> None:
        """Read once. Raises KeySourceAway."""
        began_s = self._clock()
        found = await self._source.changes(self._snapshot)
        if found.server != self._server:
            # The first read, or another server: what was not told before now is not known.
            self._keys.all_changed()
        else:
            self._keys.changed(found.key_ids, found.customer_ids)
        self._revoked(found.revoked)
        self._snapshot, self._server, self._read_s = found.snapshot, found.server, began_s
        self._keys.current(as_of_s=began_s)

    async def run(self) -> None:
        """Read for ever; says once when the source goes away and once when it is back."""
        away = False
        while True:
            began_s = self._clock()
            try:
                await self.read()
            except KeySourceAway as error:
                self._why = str(error)
                if not away:
                    logger.warning("changes of keys cannot be read", extra={"fields": {"why": error}})
                away = True
            else:
                if away:
                    logger.info("changes of keys are read again")
                away = False
            await asyncio.sleep(max(READ_EVERY_S / 10, began_s + READ_EVERY_S - self._clock()))
