"""An unknown schema is asked for after its record was read, once for many records, and until Kafka answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

import gpu_worker.unlearnt
from gpu_worker.unlearnt import Unlearnt
from infra.kafka import BusUnavailable
from schemas.codec import UnknownSchema, encode
from tests.factories import requested
from tests.newer_writer import NewerWriter, forgetful


class Schemas:
    """Answers when it is let go; `publish` is learnt then. Counts how often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.codec = forgetful()
        monkeypatch.setattr(gpu_worker.unlearnt, "decode_at", self.codec.decode_at)
        self.asked = 0
        self.published: list[Any] = []
        self.errors: list[Exception] = []
        self.free = asyncio.Event()
        self.free.set()

    async def learn(self) -> None:
        self.asked += 1
        found = list(self.published)
        await self.free.wait()
        if self.errors:
            raise self.errors.pop(0)
        for schema in found:
            self.codec.learn(schema)


@pytest.fixture
def schemas(monkeypatch: pytest.MonkeyPatch) -> Schemas:
    monkeypatch.setattr(gpu_worker.unlearnt, "_FIRST_RETRY_S", 0.0)
    return Schemas(monkeypatch)


def place(value: bytes) -> Any:
    return SimpleNamespace(topic="t", partition=0, offset=7, value=value)


WRITER = NewerWriter(requested())


async def test_a_newer_writers_request_is_read_once_its_schema_is_learnt(schemas: Schemas) -> None:
    schemas.published = [WRITER.published]
    request = requested()
    assert await Unlearnt(schemas.learn).decode(place(WRITER.write(encode(request)))) == request


async def test_an_id_that_means_nothing_is_refused_with_its_place(schemas: Schemas) -> None:
    with pytest.raises(UnknownSchema, match="t partition 0 offset 7: schema id 4711 is unknown here"):
        await Unlearnt(schemas.learn).decode(place(WRITER.write(encode(requested()))))


async def test_many_records_share_an_asking_that_began_after_each_of_them(schemas: Schemas) -> None:
    unlearnt, value = Unlearnt(schemas.learn), WRITER.write(encode(requested()))
    schemas.free.clear()
    early = asyncio.create_task(unlearnt.decode(place(value)))
    await asyncio.sleep(0)
    assert schemas.asked == 1
    schemas.published = [WRITER.published]  # just after that asking looked
    late = [asyncio.create_task(unlearnt.decode(place(value))) for _ in range(500)]
    await asyncio.sleep(0)
    schemas.free.set()
    with pytest.raises(UnknownSchema):
        await early
    await asyncio.gather(*late)
    assert schemas.asked == 2


@pytest.mark.parametrize("error", [BusUnavailable("away"), asyncio.TimeoutError()])
async def test_while_kafka_is_away_nothing_is_called_unknown(schemas: Schemas, error: Exception) -> None:
    schemas.errors = [error, error, error]
    schemas.published = [WRITER.published]
    await Unlearnt(schemas.learn).decode(place(WRITER.write(encode(requested()))))
    assert schemas.asked == 4
