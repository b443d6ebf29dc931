"""Where the group stands on the broker, what the topic keeps, and where the ledger stands: settled before reading.

The broker may be behind (a batch was committed to Postgres but not yet to Kafka): then records come again and count
nothing. It must never be ahead, and no record may be gone that the ledger lacks: both would be skipped for good.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from infra.kafka import BusUnavailable, KafkaError, TopicPartition, open_consumer
from infra.kafka_admin import open_admin
from infra.kafka_spans import spans_kept
from infra.settings import KafkaSettings

log = logging.getLogger(__name__)


class Book(Protocol):
    """What is needed of the ledger (streams.ledger.tables.Ledger fits)."""

    async def positions(self, topic: str) -> Mapping[int, int]:
        """Next offset per partition."""

    async def topic_id(self, topic: str) -> UUID | None:
        """Which topic of that name they are of."""

    async def move(self, topic: str, topic_id: UUID | None, moves: Mapping[int, tuple[int | None, int]]) -> None:
        """Set next offsets, also backwards, from what was read to the second, and which topic they are of."""


class LedgerBehind(RuntimeError):
    """The ledger does not hold records that would be skipped; the message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One partition: offsets that the topic still keeps, the group's offset on the broker, the ledger's next offset.

    The two offsets are None where the group or the ledger never was. `remade` says that the ledger's was reached in
    another topic of this name.
    """

    kept: range
    committed: int | None
    next_offset: int | None
    remade: bool = False

    @property
    def anew(self) -> bool:
        """The topic was made anew; or it lost records: the ledger is past its end."""
        return self.remade or (self.next_offset is not None and self.next_offset > self.kept.stop)

    @property
    def gone(self) -> range:
        """Records that the ledger lacks and the topic no longer keeps. Where neither group nor ledger was: none."""
        if self.anew:
            return range(self.kept.start)
        lacks_from = self.next_offset if self.next_offset is not None else 0 if self.committed else self.kept.start
        return range(lacks_from, self.kept.start)

    @property
    def begin(self) -> int:
        """Where the ledger must stand when reading begins."""
        return self.kept.start if self.anew else max(self.next_offset or 0, self.kept.start)

    @property
    def ahead(self) -> bool:
        """The broker says that records were handled that the ledger does not hold."""
        return self.begin < (self.committed or 0) <= self.kept.stop


async def settle_positions(
    settings: KafkaSettings,
    *,
    group: str,
    topic: str,
    partitions: int,
    book: Book,
    rewind: bool,
    skip_gone: bool,
) -> UUID | None:
    """Return which topic it is when the group may start reading; None where the broker tells no ids.

    With `rewind`, a group that is ahead is moved back to the ledger, which the broker only does while the group has
    no member; records between are then read again and those already counted collapse. With `skip_gone` the ledger goes
    on after records that the topic no longer keeps. A topic that was made anew is read from its beginning without
    being told: nothing of it was counted. Raises LedgerBehind when it may or can not go on, BusUnavailable.
    """
    # 1  move the group back on the broker    2  set the ledger's positions, and which topic they are of
    # Dying between them leaves a broker that is behind, and the next start does the same again.
    try:
        async with open_admin(settings) as admin:
            committed = {tp.partition: o for tp, o in (await admin.committed(group)).items() if tp.topic == topic}
            found = (await admin.partitions([topic])).get(topic, partitions)
            topic_id = await admin.topic_id(topic)
        if found != partitions:
            raise LedgerBehind(
                f"{topic} has {found} partitions, expected {partitions}: a customer's usage would no longer be in one, "
                "and what is beyond would not be watched. Make a topic of the right number and copy the records"
            )
        async with open_consumer(settings, group=None) as consumer:
            kept = await spans_kept(consumer, [TopicPartition(topic, p) for p in range(partitions)])
        # After the broker's: a ledger that runs beside writes here first, and would else seem to be behind.
        next_offsets = await book.positions(topic)
        known_id = await book.topic_id(topic)
        standings = {
            tp.partition: Standing(
                kept=span,
                committed=committed.get(tp.partition),
                next_offset=next_offsets.get(tp.partition),
                remade=None not in (known_id, topic_id) and known_id != topic_id,
            )
            for tp, span in kept.items()
        }
        anew = {p: s for p, s in standings.items() if s.anew}
        if anew:
            log.critical("%s: was made anew and is read from its beginning: %s", topic, _places(anew))
        _refuse_gone(topic, standings, skip_gone=skip_gone)
        await _move_back(settings, group, topic, standings, rewind=rewind)
        moves = {p: (s.next_offset, s.begin) for p, s in standings.items() if s.begin != (s.next_offset or 0)}
        await book.move(topic, topic_id, moves)
        return topic_id
    except KafkaError as error:
        raise BusUnavailable(f"{settings.bootstrap}: {type(error).__name__}: {error}") from error


def _refuse_gone(topic: str, standings: Mapping[int, Standing], *, skip_gone: bool) -> None:
    gone = {p: s.gone for p, s in standings.items() if s.gone}
    if not gone:
        return
    places = "; ".join(f"partition {p}: {g.start} to {g.stop - 1}" for p, g in gone.items())
    if not skip_gone:
        raise LedgerBehind(
            f"{topic}: records that the ledger lacks are no longer on the topic ({places}). Restore a newer backup of "
            "the database or the records from an archive, or start once with INFERLOG_LEDGER_SKIP_GONE=1: then their "
            "usage is never billed"
        )
    log.critical("%s: records are gone and will not be counted: %s", topic, places)


async def _move_back(
    settings: KafkaSettings, group: str, topic: str, standings: Mapping[int, Standing], *, rewind: bool
) -> None:
    ahead = {p: s for p, s in standings.items() if s.ahead}
    if not ahead:
        return
    if not rewind and not all(s.anew for s in ahead.values()):
        raise LedgerBehind(
            f"{topic}, group {group}: {_places(ahead)}. Reading on would lose the records between. If the database was "
            "restored from a backup or emptied, stop every worker of this group and start one with "
            "INFERLOG_LEDGER_REWIND=1: it reads them again, and what was counted already is not counted twice"
        )
    targets = {TopicPartition(topic, p): s.begin for p, s in ahead.items()}
    async with open_consumer(settings, group=group) as consumer:
        consumer.assign(list(targets))
        try:
            await consumer.commit(targets)
        except KafkaError as error:
            raise LedgerBehind(
                f"{topic}, group {group}: cannot be moved back while it has members; stop every worker of the group "
                f"first ({type(error).__name__})"
            ) from error
    log.warning("moved the group back to the ledger: %s", _places(ahead))


def _places(standings: Mapping[int, Standing]) -> str:
    return "; ".join(
        f"partition {p}: the broker's committed offset is {s.committed or 0}, the ledger's next offset is "
        f"{s.next_offset or 0}, the topic keeps {s.kept.start} to {s.kept.stop - 1}"
        for p, s in sorted(standings.items())
    )
