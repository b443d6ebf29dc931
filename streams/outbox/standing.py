"""How the relay stands: active, standing by or held up, and which topics a fact blocks; what changes is said once.

A topic is blocked by a fact that Kafka refuses, because nothing may overtake it there. Other topics go on; the blocked
one is tried again each minute, and said again. A topic is held as long as another writer's open transaction hides what
earlier relays published there; that too is said each minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from infra.outbox import WaitingFact
from streams.outbox.backfill import Untold

log = logging.getLogger(__name__)

RETRY_S: Final = 60.0
#: Between two looks at a topic that is held.
LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The fact at which a topic stands still, why, and until when it is not tried again."""

    event_id: UUID
    position: int
    reason: str
    until_s: float


def next_stride(stride: int, *, tried: int, refused: bool, most: int) -> int:
    """How many facts the next transaction takes: half of those among which one was refused, so that it is found alone.

    Twice as many after success.
    """
    return max(tried // 2, 1) if refused and tried > 1 else most if refused else min(stride * 2, most)


class Standing:
    """What the relay says of itself: `state` is starting, standby, telling, active or away.

    `why` is what made it away, or how far it is with telling old rows.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._blocks: dict[str, Block] = {}
        self._retried: set[str] = set()
        self._held: dict[str, str] = {}
        self._look_at_s = 0.0
        self._say_at_s = 0.0
        self._untold = Untold()
        self.state = "starting"
        self.why: str | None = None
        self.published = 0

    def active(self) -> None:
        """This relay publishes."""
        self._enter("active", "the relay publishes the outbox")

    def standby(self) -> None:
        """Another relay publishes."""
        self._enter("standby", "another relay publishes the outbox; standing by")

    def telling(self, told: int) -> None:
        """This relay writes the facts of rows that are older than the outbox; so many are written."""
        self._enter("telling", "the relay tells the rows that are older than the outbox")
        self.why = f"{told} facts about rows older than the outbox are written; nothing is published before all are"

    def passed_over(self, rows: Untold) -> None:
        """These rows older than the outbox have no fact; said once, and again by each relay that comes."""
        if rows.count and rows != self._untold:
            log.warning("%d rows older than the outbox have no fact: %s", rows.count, "; ".join(rows.first))
        self._untold = rows

    def _enter(self, state: str, words: str) -> None:
        if self.state != state:
            log.info("%s%s", words, " again" if self.state == "away" else "")
        self.state, self.why = state, None

    def away(self, why: str, *, bug: Exception | None) -> None:
        """A round has failed; an unforeseen failure is said each time, with its traceback."""
        if bug is not None:
            log.error("the relay failed and tries again", exc_info=bug)
        elif self.state != "away":
            log.warning("the outbox is held: %s", why)
        self.state, self.why = "away", why

    def block(self, fact: WaitingFact, reason: str) -> None:
        """The topic of this fact stands still at it."""
        self._retried.discard(fact.topic)
        self._blocks[fact.topic] = Block(
            event_id=fact.event_id, position=fact.position, reason=reason, until_s=self._clock() + RETRY_S
        )
        log.error(
            "facts for %s are blocked by event %s at position %d: %s", fact.topic, fact.event_id, fact.position, reason
        )

    def blocked_topics(self) -> list[str]:
        """The topics that are not to be tried now."""
        return sorted(self._blocks.keys() - self._retried)

    def retry_blocked(self) -> bool:
        """Let topics be tried again whose time has come; True when there is one."""
        due = {topic for topic, block in self._blocks.items() if block.until_s <= self._clock()} - self._retried
        self._retried |= due
        return bool(due)

    def nothing_waits(self) -> None:
        """No fact waits, but for topics that are not to be tried now: what was to be tried again is no longer there."""
        for topic in sorted(self._retried - self._held.keys()):
            del self._blocks[topic]
            self._retried.discard(topic)
            log.info("facts for %s are no longer blocked: none waits", topic)

    def hold(self, topics: Mapping[str, str]) -> None:
        """These topics, each for its reason, and no others are not published to before another look."""
        now_s = self._clock()
        again = now_s >= self._say_at_s
        for topic in sorted(self._held.keys() - topics.keys()):
            log.info("facts for %s are no longer held", topic)
        for topic, why in sorted(topics.items()):
            if topic not in self._held or again:
                log.warning("facts for %s are held until it ends: %s", topic, why)
                self._say_at_s = now_s + RETRY_S
        self._held, self._look_at_s = dict(topics), now_s + LOOK_S

    def must_look(self) -> bool:
        """Whether it is time to look again at the topics that are held."""
        return bool(self._held) and self._clock() >= self._look_at_s

    def did_publish(self, facts: Sequence[WaitingFact]) -> None:
        """These facts are on their topics."""
        self.published += len(facts)
        for topic in {f.topic for f in facts} & self._blocks.keys():
            del self._blocks[topic]
            self._retried.discard(topic)
            log.info("facts for %s are no longer blocked", topic)

    def figures(self) -> dict[str, Any]:
        """The standing as plain values, for /healthz."""
        refused = {topic: f"position {b.position}: {b.reason}" for topic, b in self._blocks.items()}
        blocked = dict(sorted((self._held | refused).items()))
        return {
            "state": self.state,
            "why": self.why,
            "published": self.published,
            "blocked": blocked,
            "untold": self._untold.plain(),
        }
