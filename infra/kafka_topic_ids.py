"""Which topic a name stands for: Kafka gives every topic an id, and one that is made anew under a name gets another.

aiokafka asks for metadata without ids (0.14.0), so version 12 of that request is spelled out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple
from uuid import UUID

from aiokafka.errors import KafkaError
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Schema, TaggedFields

from infra.kafka import BusUnavailable

_NO_ID = UUID(int=0)


class Position(NamedTuple):
    """An offset of a topic, and which topic of that name is meant; None where the broker has no ids."""

    topic_id: UUID | None
    next_offset: int


class _Uuid(AbstractType[UUID]):  # type: ignore[misc]
    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))


class _Layout(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("in_sync", CompactArray(Int32)),
                        ("offline", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _AskLayout(RequestStruct):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 12
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Layout
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", _Uuid), ("name", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class _Ask(Request[_AskLayout]):  # type: ignore[misc]
    API_KEY = 3

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[_AskLayout]) -> _AskLayout:
        return request_struct_class([(_NO_ID, name, {}) for name in self._topics], False, False, {})


async def topic_ids(client: Any, topics: Sequence[str]) -> dict[str, UUID | None]:
    """The ids of those of these topics that exist, by name, as one broker knows them now; asking creates none.

    `client` is an AIOKafkaClient. An id is None where the broker is too old to tell it. Raises BusUnavailable.
    """
    try:
        answer = await client.send(client.get_random_node(), _Ask(topics))
    except NotImplementedError:  # how aiokafka says that the broker does not know version 12
        return dict.fromkeys(await _names(client) & set(topics))
    except KafkaError as error:
        raise BusUnavailable(f"{type(error).__name__}: {error}") from error
    return {name: None if found == _NO_ID else found for code, name, found, *_ in answer.topics if code == 0}


async def _names(client: Any) -> set[str]:
    try:
        return set((await client.fetch_all_metadata()).topics())
    except KafkaError as error:
        raise BusUnavailable(f"{type(error).__name__}: {error}") from error


def trusted(noted: Position, topic_id: UUID | None) -> int:
    """How far the topic of this id is known: not at all when the position was noted of another one, or of any."""
    return noted.next_offset if topic_id is not None and noted.topic_id == topic_id else 0
