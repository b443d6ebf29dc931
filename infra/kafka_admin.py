"""How Kafka is administered: topics are created, grown and described, and group offsets are read.

Nothing here removes a topic, or changes a setting of one that exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol
from uuid import UUID

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    InvalidPartitionsError,
    KafkaError,
    TopicAlreadyExistsError,
)

from infra.kafka import BusUnavailable
from infra.kafka_topic_ids import topic_ids
from infra.settings import KafkaSettings
from infra.topic_plan import Layout

_KNOWN_WITHIN_S = 10.0


class TopicLayout(Protocol):
    """What the admin needs to know of a topic (schemas.topics.Topic fits)."""

    @property
    def name(self) -> str:
        """Topic name as on the broker."""

    @property
    def partitions(self) -> int:
        """Number of partitions."""

    def config(self) -> dict[str, str]:
        """Broker-side settings."""


class Admin:
    """Creates, grows and describes topics, and reads group offsets."""

    def __init__(self, client: AIOKafkaAdminClient) -> None:
        self._client = client

    async def create_topics(self, topics: Sequence[TopicLayout], *, replication: int = 1) -> list[str]:
        """Create the topics that do not exist; returns the names of those made here. Others are left as they are.

        Returns once the broker knows them all. Raises BusUnavailable, KafkaError.
        """
        existing = set(await self._client.list_topics())
        wanted = [t for t in topics if t.name not in existing]
        if not wanted:
            return []
        new = [
            NewTopic(
                name=t.name,
                num_partitions=t.partitions,
                replication_factor=replication,
                topic_configs=t.config(),
            )
            for t in wanted
        ]
        response = await self._client.create_topics(new, timeout_ms=20_000)
        codes = {name: (code, rest) for name, code, *rest in response.topic_errors}
        for name, (code, rest) in codes.items():
            if code not in (0, TopicAlreadyExistsError.errno):
                raise BusUnavailable(f"topic {name}: error {code} {rest}")
        await self._wait_for({t.name for t in wanted})
        return [t.name for t in wanted if codes[t.name][0] == 0]

    async def _wait_for(self, topics: set[str]) -> None:
        """The controller has made them; until the broker has heard of it, clients are told that they do not exist."""
        clock = asyncio.get_running_loop().time
        ends_s = clock() + _KNOWN_WITHIN_S
        while missing := topics - (await self.partitions(sorted(topics))).keys():
            if clock() > ends_s:
                raise BusUnavailable(f"created, but not known to the broker: topics {', '.join(sorted(missing))}")
            await asyncio.sleep(0.02)

    async def grow(self, topic: str, partitions: int) -> bool:
        """Give a topic this many partitions in all; False when it has as many or more. Raises KafkaError."""
        try:
            await self._client.create_partitions({topic: NewPartitions(partitions)}, timeout_ms=20_000)
        except InvalidPartitionsError:
            if (await self.partitions([topic])).get(topic, 0) < partitions:
                raise
            return False
        return True

    async def layouts(self, topics: Sequence[str]) -> dict[str, Layout]:
        """Partitions and settings of each of these topics that exists. Raises KafkaError."""
        partitions = await self.partitions(topics)
        resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in partitions]
        found: dict[str, Layout] = {}
        for response in await self._client.describe_configs(resources) if resources else ():
            for _code, _message, _kind, name, entries, *_ in response.resources:
                config = {entry[0]: entry[1] or "" for entry in entries}
                found[name] = Layout(partitions=partitions[name], config=config)
        return found

    async def partition_counts(self) -> dict[str, int]:
        """Number of partitions of every topic on the broker, by name."""
        return {t["topic"]: len(t["partitions"]) for t in await self._client.describe_topics()}

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        """Number of partitions of each of these topics that exists."""
        if not topics:
            return {}
        found = await self._client.describe_topics(list(topics))
        return {t["topic"]: len(t["partitions"]) for t in found if not t["error_code"]}

    async def topic_id(self, topic: str) -> UUID | None:
        """The id of a topic; None when there is no such topic, or the broker tells no ids. Raises BusUnavailable."""
        return (await topic_ids(self._client._client, [topic])).get(topic)

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        """Next offset per partition that a group has committed; empty for an unknown group. Raises KafkaError.

        The first question about any group has the broker make the topic where groups are kept, which takes a moment.
        """
        clock = asyncio.get_running_loop().time
        ends_s = clock() + _KNOWN_WITHIN_S
        while True:
            try:
                offsets = await self._client.list_consumer_group_offsets(group)
                break
            except GroupCoordinatorNotAvailableError:
                if clock() > ends_s:
                    raise
            await asyncio.sleep(0.1)
        return {tp: meta.offset for tp, meta in offsets.items() if meta.offset >= 0}


@asynccontextmanager
async def open_admin(settings: KafkaSettings, *, request_timeout_ms: int = 10_000) -> AsyncIterator[Admin]:
    """A started admin client. Raises BusUnavailable."""
    client = AIOKafkaAdminClient(bootstrap_servers=settings.bootstrap, request_timeout_ms=request_timeout_ms)
    try:
        await client.start()
    except KafkaError as error:
        await client.close()
        raise BusUnavailable(f"{settings.bootstrap}: {type(error).__name__}: {error}") from error
    try:
        yield Admin(client)
    finally:
        await client.close()
