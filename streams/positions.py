"""Where the group stands on the broker against where the ledger stands, settled once before anything is read.

The broker may be behind (a batch was committed to Postgres but not yet acknowledged): then records come again and
count nothing. It must never be ahead: those records would be skipped for good.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from infra.kafka import BusUnavailable, KafkaError, TopicPartition, open_consumer
from infra.kafka_admin import open_admin
from infra.settings import KafkaSettings

log = logging.getLogger(__name__)


class LedgerBehind(RuntimeError):
    """The broker says records were handled that the ledger does not hold; the message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """A partition whose committed offset is past the ledger's `next_offset`."""

    partition: int
    committed: int
    next_offset: int


def behind(committed: Mapping[int, int], next_offsets: Mapping[int, int]) -> list[Behind]:
    """The partitions where the broker is ahead of the ledger; a partition the ledger never read stands at 0."""
    return [
        Behind(partition=p, committed=offset, next_offset=next_offsets.get(p, 0))
        for p, offset in sorted(committed.items())
        if offset > next_offsets.get(p, 0)
    ]


async def settle_positions(
    settings: KafkaSettings, *, group: str, topic: str, next_offsets: Mapping[int, int], rewind: bool
) -> None:
    """Return when the group may start reading.

    With `rewind`, a group that is ahead is moved back to the ledger, which the broker only does while the group has
    no member; records between are then read again and those already counted collapse. Raises LedgerBehind when it may
    or can not be moved, BusUnavailable.
    """
    try:
        async with open_admin(settings) as admin:
            committed = {tp.partition: o for tp, o in (await admin.committed(group)).items() if tp.topic == topic}
        ahead = behind(committed, next_offsets)
        if not ahead:
            return
        places = "; ".join(
            f"partition {b.partition}: the broker's committed offset is {b.committed}, the ledger's next offset is "
            f"{b.next_offset}"
            for b in ahead
        )
        if not rewind:
            raise LedgerBehind(
                f"{topic}, group {group}: {places}. Reading on would lose the records between. If the database was "
                "restored from a backup or emptied, stop every worker of this group and start one with "
                "INFERLOG_LEDGER_REWIND=1: it reads them again, and what was counted already is not counted twice"
            )
        await _move_back(settings, group=group, topic=topic, ahead=ahead)
        log.warning("moved the group back to the ledger: %s", places)
    except KafkaError as error:
        raise BusUnavailable(f"{settings.bootstrap}: {type(error).__name__}: {error}") from error


async def _move_back(settings: KafkaSettings, *, group: str, topic: str, ahead: list[Behind]) -> None:
    targets = {TopicPartition(topic, b.partition): b.next_offset for b in ahead}
    async with open_consumer(settings, group=group) as consumer:
        firsts = await consumer.beginning_offsets(list(targets))
        gone = [f"partition {tp.partition}: {o} to {firsts[tp] - 1}" for tp, o in targets.items() if firsts[tp] > o]
        if gone:
            raise LedgerBehind(
                f"{topic}: the records that the ledger lacks are no longer on the topic ({'; '.join(gone)}); restore a "
                "newer backup, or rebuild from an archive"
            )
        consumer.assign(list(targets))
        try:
            await consumer.commit(targets)
        except KafkaError as error:
            raise LedgerBehind(
                f"{topic}, group {group}: cannot be moved back while it has members; stop every worker of the group "
                f"first ({type(error).__name__})"
            ) from error
