"""How Kafka is administered: topics are created, compared with their declaration, and group offsets are read.

Nothing here alters or removes a topic that exists.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError

from infra.kafka import BusUnavailable
from infra.settings import KafkaSettings


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A topic that exists otherwise than declared: which setting, what was declared, what was found."""

    topic: str
    setting: str
    declared: str
    found: str


class Admin:
    """Creates topics, compares them with their declaration, and reads group offsets."""

    def __init__(self, client: AIOKafkaAdminClient) -> None:
        self._client = client

    async def create_topics(self, topics: Sequence[TopicLayout], *, replication: int = 1) -> list[str]:
        """Create the topics that do not exist; returns their names. Existing ones are left as they are."""
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
        for name, code, *rest in response.topic_errors:
            if code not in (0, TopicAlreadyExistsError.errno):
                raise BusUnavailable(f"topic {name}: error {code} {rest}")
        return [t.name for t in wanted]

    async def drift(self, topics: Sequence[TopicLayout]) -> list[Drift]:
        """Every difference between these topics as declared and as they are on the broker."""
        found = {t["topic"]: t for t in await self._client.describe_topics([t.name for t in topics])}
        resources = [ConfigResource(ConfigResourceType.TOPIC, t.name) for t in topics]
        configs: dict[str, Mapping[str, str]] = {}
        for response in await self._client.describe_configs(resources):
            for resource in response.resources:
                configs[resource[3]] = {entry[0]: entry[1] for entry in resource[4]}
        drifts = []
        for t in topics:
            partitions = len(found[t.name]["partitions"])
            if partitions != t.partitions:
                drifts.append(
                    Drift(topic=t.name, setting="partitions", declared=str(t.partitions), found=str(partitions))
                )
            for setting, declared in t.config().items():
                actual = configs.get(t.name, {}).get(setting, "")
                if actual != declared:
                    drifts.append(Drift(topic=t.name, setting=setting, declared=declared, found=actual))
        return drifts

    async def partition_counts(self) -> dict[str, int]:
        """Number of partitions of every topic on the broker, by name."""
        return {t["topic"]: len(t["partitions"]) for t in await self._client.describe_topics()}

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        """Number of partitions of each of these topics that exists."""
        if not topics:
            return {}
        found = await self._client.describe_topics(list(topics))
        return {t["topic"]: len(t["partitions"]) for t in found if not t["error_code"]}

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        """Next offset per partition that a group has committed; empty for an unknown group."""
        offsets = await self._client.list_consumer_group_offsets(group)
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
