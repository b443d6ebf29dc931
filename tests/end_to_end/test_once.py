"""Exactly one charge and one outcome for a call that is sent again, whatever was lost in between.

Counted from the usage topic and the ledger, with every process real and the `openai` client as it comes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from infra.redis import open_redis
from infra.settings import operator_settings
from schemas.codec import decode
from schemas.records import InferenceRequested, UsageRecorded
from schemas.topics import USAGE, requests_topic
from streams.log import open_log
from tests.end_to_end.crossing import FAILED, LATE, LOST, LOST_BEFORE, another, crossing, text_bundle
from tests.end_to_end.installation import Installation, Spawn
from tests.integration.api_desk import run
from tests.processes import free_port

#: A gateway that dies when two calls are about to be put on its log, or, not `{before}`, when both are there.
DIES_AT_THE_LOG = """
import asyncio, os, signal
from api.request_log import RequestLog
real, there = RequestLog.publish, []
async def publish(self, record, *, pool, spread):
    if not {before}:
        await real(self, record, pool=pool, spread=spread)
    there.append(record)
    if len(there) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.Event().wait()
RequestLog.publish = publish
from api.__main__ import main
main()
"""


@dataclass
class World:
    """Two gateways, a worker and a ledger; `expected` is what should be billed in the end."""

    installation: Installation
    urls: list[str]
    expected: int = 0
    texts: dict[str, int] = field(default_factory=dict)

    def bill(self, text: str, times: int = 1) -> None:
        """So many requests with this text are to be billed, and no more are to be run."""
        self.texts[text] = self.texts.get(text, 0) + times
        self.expected += times

    async def embed(self, text: str, *, url: str | None = None, **headers: str) -> tuple[int, Mapping[str, str], Any]:
        """A call without any client that repeats it: its status, headers and body."""
        headers.setdefault("Authorization", f"Bearer {self.installation.key}")
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{url or self.urls[0]}/v1/embeddings", json={"model": "texts", "input": text}, headers=headers
            ) as answer,
        ):
            return answer.status, answer.headers, await answer.json(content_type=None)

    async def records(self, topic: Any, kind: type[Any]) -> list[Any]:
        """All of a topic."""
        settings = operator_settings(self.installation.env).kafka
        name = topic.in_namespace(settings.namespace).name
        async with open_log(settings) as reader:
            spans = await reader.freeze(name, topic.partitions)
            return [decode(entry.value, kind) async for entry in reader.read(name, spans)]

    async def holds(self) -> None:
        """What was to be billed was billed, and nothing else: by the log, and by the ledger."""
        report = self.installation.verify()
        assert report["holds"] is True
        requests = await self.records(requests_topic(), InferenceRequested)
        text_of = {r.request_id: next(iter(r.inputs[0].elements())).decode() for r in requests}
        billed: dict[str, set[Any]] = defaultdict(set)
        for usage in await self.records(USAGE, UsageRecorded):
            billed[text_of[usage.request_id]].add(usage.request_id)
        assert {text: len(ids) for text, ids in billed.items()} == self.texts
        assert len(set(text_of)) == self.expected, "a call was run under another id, without being billed"
        assert self.installation.usage()["requests"] == self.expected


@asynccontextmanager
async def client(url: str, key: str, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **{"timeout": 20.0, **options}) as made:
        yield made


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_bundle(tmp_path_factory.mktemp("texts") / "bundle")


@pytest.fixture
async def world(env: dict[str, str], spawn: Spawn, bundle: Path) -> World:
    installation = Installation(env=env, spawn=spawn)
    installation.make_customer("acme")
    version = installation.publish("texts", str(bundle))
    urls = []
    for _ in range(2):
        installation.start_api()
        urls.append(installation.url)
        await installation.routed("texts", version)
    installation.start_worker()
    installation.start_ledger()
    return World(installation, urls)


async def flush(env: dict[str, str]) -> None:
    """Take from Redis all that is this installation's."""
    settings = operator_settings(env).redis
    async with open_redis(settings) as redis:
        keys = [key async for key in redis.scan_iter(match=f"{settings.namespace}*", count=1000)]
        assert any(b"result" in bytes(key) for key in keys)
        await redis.delete(*keys)


async def test_whatever_is_lost_on_the_way_to_the_openai_client_a_call_is_billed_once(
    world: World, bundle: Path, tmp_path: Path
) -> None:
    installation = world.installation
    async with crossing(*world.urls) as (way, url), client(url, installation.key) as openai_client:

        async def embed(text: str, by: openai.AsyncOpenAI = openai_client, times: int = 1) -> None:
            world.bill(text, times)
            await asyncio.gather(*(by.embeddings.create(model="texts", input=text) for _ in range(times)))

        async def sent_again(text: str, *faults: str, by: openai.AsyncOpenAI = openai_client) -> None:
            way.seen.clear()
            way.faults = list(faults)
            await embed(text, by)
            answered = [request_id for request_id, status in way.seen if status == 200]
            assert len(answered) == len(faults) + 1 - faults.count(LOST_BEFORE)
            assert len(set(answered)) == 1, "one outcome"

        await sent_again("told 500", FAILED)
        await sent_again("told 500 twice", FAILED, FAILED)
        await sent_again("connection closed", LOST)
        await sent_again("never came, then closed", LOST_BEFORE, LOST)
        async with client(url, installation.key, timeout=0.7) as hasty:
            await sent_again("timed out, though it did finish", LATE, by=hasty)
        way.on_fault = lambda: flush(installation.env)
        await sent_again("Redis flushed between the tries", LOST)
        newer = str(another(bundle, tmp_path / "newer"))
        new = run(installation.env, "models", "publish", "texts", newer, "--no-route", "--json")["version"]

        async def switch() -> None:
            await asyncio.to_thread(run, installation.env, "models", "route", "texts", new, "--json")
            for installation.url in world.urls:
                await installation.routed("texts", new)

        way.on_fault = switch
        await sent_again("route switched between the tries", LOST)
        way.on_fault = None
        for _ in range(2):
            await embed("two honest calls, one after the other")
        await embed("five honest calls at once", times=5)
        way.faults = [LOST] * 3
        await embed("three honest calls at once, each sent again", times=3)
        assert way.faults == []
    await world.holds()
    requests = await world.records(requests_topic(), InferenceRequested)
    by_text = {next(iter(r.inputs[0].elements())).decode(): r for r in requests}
    assert by_text["route switched between the tries"].version != new
    assert by_text["two honest calls, one after the other"].version == new


async def test_one_idempotency_key_is_one_request_at_two_processes_at_once_and_when_one_of_them_is_killed(
    world: World,
) -> None:
    for at in range(0, 100, 25):
        await asyncio.gather(*(pair(world, n) for n in range(at, at + 25)))
    status, _, document = await world.embed("another text", **{"Idempotency-Key": "key 0"})
    assert (status, document["error"]["code"]) == (422, "idempotency_key_reused")
    await flush(world.installation.env)
    status, headers, _ = await world.embed("pair 0", **{"Idempotency-Key": "key 0"})
    assert (status, headers["Idempotent-Replayed"]) == (200, "true")
    for before in (True, False):
        await killed_at_the_log(world, before=before)
    await world.holds()


async def pair(world: World, n: int) -> None:
    """Four equal calls at once, two at each gateway."""
    world.bill(f"pair {n}")
    calls = [world.embed(f"pair {n}", url=url, **{"Idempotency-Key": f"key {n}"}) for url in world.urls * 2]
    answers = await asyncio.gather(*calls)
    assert [status for status, _, _ in answers] == [200] * 4
    assert len({headers["x-request-id"] for _, headers, _ in answers}) == 1
    assert [headers.get("Idempotent-Replayed") for _, headers, _ in answers].count("true") == 3
    assert all(document == answers[0][2] for _, _, document in answers)


async def killed_at_the_log(world: World, *, before: bool) -> None:
    """Two calls, one known by a key and one by its client's count, are sent again after their gateway was killed."""
    port = free_port()
    command = ["python", "-c", DIES_AT_THE_LOG.format(before=before)]
    env = {**world.installation.env, "INFERLOG_API_PORT": str(port)}
    gateway, url = world.installation.spawn(command, env, name="dying"), f"http://127.0.0.1:{port}"
    gateway.wait_ready(f"{url}/readyz")
    when = "before" if before else "after"
    calls: dict[str, dict[str, str]] = {
        f"killed {when}, with a key": {"Idempotency-Key": f"killed {when}"},
        f"killed {when}, counted": {"x-stainless-retry-count": "0"},
    }
    tries = [world.embed(text, url=url, **headers) for text, headers in calls.items()]
    lost = await asyncio.gather(*tries, return_exceptions=True)
    assert all(isinstance(error, (aiohttp.ClientError, OSError)) for error in lost), lost
    await asyncio.to_thread(gateway.wait)
    for text, headers in calls.items():
        world.bill(text)
        again = {name: value.replace("0", "1") for name, value in headers.items()}
        status, _, document = await world.embed(text, **again)
        assert (status, len(document["data"])) == (200, 1)
