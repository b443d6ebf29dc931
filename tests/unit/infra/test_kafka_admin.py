"""A broker that never had a group takes a moment to find out who keeps their offsets; that is not an outage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import GroupCoordinatorNotAvailableError

from infra import kafka_admin
from infra.kafka import TopicPartition
from infra.kafka_admin import Admin


class Client:
    """Does not know the coordinator for the first so many questions."""

    def __init__(self, unknown: int) -> None:
        self._unknown = unknown

    async def list_consumer_group_offsets(self, _group: str) -> dict[TopicPartition, Any]:
        if self._unknown:
            self._unknown -= 1
            raise GroupCoordinatorNotAvailableError
        return {TopicPartition("t", 0): SimpleNamespace(offset=7), TopicPartition("t", 1): SimpleNamespace(offset=-1)}


async def test_offsets_are_asked_for_until_the_broker_knows_who_keeps_them() -> None:
    assert await Admin(Client(2)).committed("g") == {TopicPartition("t", 0): 7}


async def test_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_admin, "_KNOWN_WITHIN_S", 0.0)
    with pytest.raises(GroupCoordinatorNotAvailableError):
        await Admin(Client(1000)).committed("g")
