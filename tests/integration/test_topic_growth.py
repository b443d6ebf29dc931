"""A pool's topic grows from 8 to 12 partitions under a running gateway and worker: nothing is lost, nothing waits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_worker.bundle import read_bundle
from infra.kafka import TopicPartition, open_consumer
from infra.provision import provision
from infra.settings import operator_settings
from infra.topic_plan import Growth
from schemas.codec import decode
from schemas.records import InferenceRequested
from schemas.topics import all_topics, partitions_for_version, requests_topic
from tests.conditions import eventually
from tests.integration.api_desk import Caller, calling, customer, register, start_gateway
from tests.integration.worker_desk import constant_bundle, start_worker, store_bundle

BEFORE, AFTER, SPREAD = 8, 12, 2


def moving_bundle(folder: Path) -> Path:
    """A model whose version gets one of the new partitions."""
    number = 0
    while True:
        bundle = constant_bundle(folder / str(number), 7.0)
        version = read_bundle(bundle).version
        if max(partitions_for_version(version, partitions=AFTER, spread=SPREAD)) >= BEFORE:
            return bundle
        number += 1


class Traffic:
    """Calls one after the other from several callers at once, each of which must be answered."""

    def __init__(self, caller: Caller, callers: int) -> None:
        self._caller = caller
        self._stopping = False
        self.answered = 0
        self._tasks = [asyncio.ensure_future(self._run()) for _ in range(callers)]

    async def _run(self) -> None:
        while not self._stopping:
            reply = await self._caller.infer(timeout_s=60)
            if reply.status != 200:
                raise SystemError(f"{reply.status} {reply.text}")
            self.answered += 1

    async def more(self, count: int) -> None:
        """Until that many further calls are answered."""
        wanted = self.answered + count

        def answered() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return self.answered >= wanted

        await eventually(answered, timeout_s=60, what=f"{count} more answers")

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


async def placed(env: Mapping[str, str]) -> dict[int, list[InferenceRequested]]:
    """Requests on the topic by partition."""
    settings = operator_settings(env).kafka
    topic = requests_topic().in_namespace(settings.namespace).name
    places = [TopicPartition(topic, p) for p in range(AFTER)]
    found: dict[int, list[InferenceRequested]] = {p: [] for p in range(AFTER)}
    async with open_consumer(settings, group=None) as consumer:
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        while any([await consumer.position(p) < end for p, end in ends.items()]):
            for place, records in (await consumer.getmany(timeout_ms=200)).items():
                found[place.partition] += [decode(r.value, InferenceRequested) for r in records]
    return found


async def test_a_request_topic_grows_under_traffic(env: dict[str, str], spawn: Any, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    bundle = moving_bundle(tmp_path / "models")
    version = store_bundle(env, bundle)
    await register(env, "digits", read_bundle(bundle))
    acme = customer(env, "Acme")
    start_worker(spawn, env)
    first = start_gateway(spawn, env)
    wider = [replace(t, partitions=AFTER) if t.may_grow else t for t in all_topics()]
    topic = requests_topic().in_namespace(operator_settings(env).kafka.namespace).name

    async with calling(first, acme["key"]) as caller:
        old = Traffic(caller, 4)
        await old.more(10)
        grown = await provision(operator_settings(env), declared=wider)
        assert grown.grown == [Growth(topic=topic, found=BEFORE, partitions=AFTER)]
        assert not grown.drift
        # The gateway that runs goes on as before; one that starts now, even before the worker has looked again, uses
        # the new partitions.
        second = start_gateway(spawn, env)
        async with calling(second, acme["key"]) as newcomer:
            new = Traffic(newcomer, 2)
            await new.more(10)
            await old.more(10)
            await asyncio.gather(old.stop(), new.stop())
    assert not (await provision(operator_settings(env), declared=wider)).grown

    requests = await placed(env)
    assert sum(map(len, requests.values())) == old.answered + new.answered
    used = {p for p, found in requests.items() if found}
    before = partitions_for_version(version, partitions=BEFORE, spread=SPREAD)
    after = partitions_for_version(version, partitions=AFTER, spread=SPREAD)
    assert used == {*before, *after}
    assert max(used) >= BEFORE
