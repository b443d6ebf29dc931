"""`make bench-results`: how long results take that Redis does not have, on a log of a million.

The log is filled with results of an hour, stamped when they would have been written. Then (a) random ones are read by
their ids while Redis has none, (b) calls wait whose results are written to the log only, while Redis is flushed every
second and others' results go on, and (c) the same with so few calls that the gateway has stopped following the log
before each. The last line is one JSON object. Exits 1 when an answer is missing or wrong, never for slowness; the
first wrong ones are shown.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import click
import uvloop

from benchmarks.echo import answering, on_the_log, result
from benchmarks.percentiles import percentiles_ms
from docs.demo import digits
from docs.demo.shell import inferlog, inferlog_json, say
from infra.kafka import open_producer, partition_of_key
from infra.local.stack import Stack
from infra.redis import open_redis
from infra.settings import OperatorSettings, operator_settings
from infra.tasks import end
from schemas.codec import decode, encode
from schemas.ids import new_request_id
from schemas.records import InferenceFinished
from schemas.topics import RESULTS

HOUR_S = 3600
CUSTOMERS = 8
#: Records of one batch on the log: what one run of a worker leaves in a partition.
_BATCH_RECORDS = 16
_SAMPLE = 4000
_LOOKERS = 4
_AHEAD = 2000
_OTHERS_PER_S = 280
#: Between two calls of (c): longer than a gateway follows a partition that nobody needs.
_APART_S = 31.0
#: So many wrong answers are shown.
_SHOWN = 10

#: An id and the customer it belongs to.
Known = tuple[UUID, int]


@click.command(epilog="Example:  python -m benchmarks.results --results 100000 --seconds 20")
@click.option("--results", default=1_000_000, show_default=True, help="Results on the log.")
@click.option("--reads", default=2000, show_default=True, help="Status reads of random ids.")
@click.option("--seconds", default=60.0, show_default=True, help="Length of the run with waiting calls.")
@click.option("--rate", default=50.0, show_default=True, help="Waiting calls a second.")
@click.option(
    "--alone", default=5, show_default=True, help="Calls each of which wakes the gateway's reader; 0 for none."
)
@click.option("--seed", default=None, type=int, help="Seed of everything that is drawn; printed when it is drawn.")
def main(results: int, reads: int, seconds: float, rate: float, alone: int, seed: int | None) -> None:
    """Measure answers from the results topic, on a stack of its own."""
    drawn = seed if seed is not None else int.from_bytes(os.urandom(4), "big")
    say(f"seed {drawn}")
    home = Path(tempfile.mkdtemp(prefix="inferlog-results-"))
    os.environ["INFERLOG_HOME"] = str(home)
    stack = Stack(home)
    try:
        env = stack.up(progress=lambda line: say(f"  {line}"))
        digits.build(home / "bundle")
        inferlog("models", "publish", "digits", str(home / "bundle"), "--route")
        made = [inferlog_json("customers", "create", f"c{n}", *_UNLIMITED) for n in range(CUSTOMERS)]
        keys = [inferlog_json("keys", "create", m["customer_id"])["key"] for m in made]
        for part in ("worker", "streams"):
            stack.stop_part(part)
        bench = Bench(
            operator_settings(),
            f"http://127.0.0.1:{env['INFERLOG_API_PORT']}",
            [m["customer_id"] for m in made],
            keys,
            random.Random(drawn),
        )
        figures = uvloop.run(bench.run(results, reads, seconds, rate, alone))
    finally:
        stack.down(wipe=True)
        shutil.rmtree(home, ignore_errors=True)
    say(json.dumps({**figures, "results": results, "seed": drawn}))
    sys.exit(1 if figures["wrong"] else 0)


_UNLIMITED = ("--requests-per-s", "100000", "--burst", "100000")


class Bench:
    """One gateway without workers, and a log that this process writes."""

    def __init__(
        self, settings: OperatorSettings, url: str, customers: Sequence[str], keys: Sequence[str], rng: random.Random
    ) -> None:
        self._settings = settings
        self._url = url
        self._customers = customers
        self._keys = keys
        self._rng = rng
        self._topic = RESULTS.in_namespace(settings.kafka.namespace).name
        self._wrong = 0

    async def run(self, results: int, reads: int, seconds: float, rate: float, alone: int) -> dict[str, Any]:
        began_s = time.monotonic()
        known = await self._fill(results)
        say(f"{results} results on the log after {time.monotonic() - began_s:.0f} s")
        timeout = aiohttp.ClientTimeout(total=30)
        connector = aiohttp.TCPConnector(limit=256)
        async with aiohttp.ClientSession(self._url, timeout=timeout, connector=connector) as self._session:
            figures = {"status_reads": await self._status_reads(self._rng.sample(known, min(reads, len(known))))}
            async with self._on_the_log_only():
                figures["waiting"] = await self._waiting(seconds, rate)
                if alone:
                    figures["waiting_alone"] = await self._waiting_alone(alone)
        return {**figures, "wrong": self._wrong}

    async def _fill(self, count: int) -> list[Known]:
        """Results of the last hour, oldest first; returns some of them."""
        shapes = [[_framed(result(new_request_id(), c, width=n)) for n in (10, 10, 10, 384)] for c in self._customers]
        start_ms, known = time.time_ns() // 1_000_000 - 1000 * HOUR_S, []
        async with open_producer(self._settings.kafka) as producer:
            client = producer._client
            partitions = len(await client.partitions_for(self._topic))
            batches = [(client.create_batch(), 0) for _ in range(partitions)]
            sent: list[asyncio.Future[Any]] = []
            for number in range(count):
                at_ms = start_ms + 1000 * HOUR_S * number // count
                request_id = new_request_id(now_ns=at_ms * 1_000_000)
                customer = self._rng.randrange(len(self._customers))
                head, tail = self._rng.choice(shapes[customer])
                if self._rng.random() < _SAMPLE / count:
                    known.append((request_id, customer))
                place = partition_of_key(request_id.bytes, partitions)
                batch, held = batches[place]
                took_ms = self._rng.randrange(20, 200)
                batch.append(
                    timestamp=at_ms + took_ms,
                    key=request_id.bytes,
                    value=head + str(request_id).encode() + tail,
                    headers=[],
                )
                batches[place] = (batch, held + 1)
                if held + 1 == _BATCH_RECORDS:
                    batch.close()
                    sent.append(await client.send_batch(batch, self._topic, partition=place))
                    batches[place] = (client.create_batch(), 0)
                    if len(sent) >= _AHEAD:
                        await asyncio.gather(*sent)
                        sent.clear()
            for place, (batch, held) in enumerate(batches):
                if held:
                    batch.close()
                    sent.append(await client.send_batch(batch, self._topic, partition=place))
            await asyncio.gather(*sent)
        return known

    async def _status_reads(self, known: Sequence[Known]) -> dict[str, Any]:
        """Every one once, with Redis empty."""
        async with open_redis(self._settings.redis) as redis:
            await redis.flushall()
        before, latencies_s = await self._counts(), []
        turns = iter(known)

        async def look() -> None:
            for request_id, customer in turns:
                started_s = time.perf_counter()
                status, document = await self._get(f"/v1/requests/{request_id}", customer)
                latencies_s.append(time.perf_counter() - started_s)
                good = status == 200 and document["id"] == str(request_id) and document["status"] == "succeeded"
                if not good:
                    self._is_wrong(status, document)

        await asyncio.gather(*(look() for _ in range(_LOOKERS)))
        after = await self._counts()
        looks = after["status_looks"] - before["status_looks"]
        figures = {
            **percentiles_ms(latencies_s, digits=1),
            "from_the_log": looks,
            "mb_per_look": round((after["status_bytes"] - before["status_bytes"]) / 1e6 / max(1, looks), 3),
        }
        say(f"status reads: {json.dumps(figures)}")
        return figures

    async def _waiting(self, seconds: float, rate: float) -> dict[str, Any]:
        """Calls that arrive at random, while Redis is flushed every second."""
        calls: list[asyncio.Task[float]] = []

        async def flush() -> None:
            async with open_redis(self._settings.redis) as redis:
                while True:
                    await asyncio.sleep(1.0)
                    await redis.flushall()

        async def measure() -> Sequence[float]:
            flushing = asyncio.ensure_future(flush())
            ends_s = time.monotonic() + seconds
            while time.monotonic() < ends_s:
                await asyncio.sleep(self._rng.expovariate(rate))
                calls.append(asyncio.ensure_future(self._call()))
            flushing.cancel()
            return await asyncio.gather(*calls)

        return await self._measured("waiting calls", measure)

    async def _waiting_alone(self, count: int) -> dict[str, Any]:
        async def measure() -> Sequence[float]:
            found = []
            for _ in range(count):
                await asyncio.sleep(_APART_S)
                found.append(await self._call())
            return found

        return await self._measured("waiting alone", measure)

    async def _measured(self, name: str, measure: Callable[[], Awaitable[Sequence[float]]]) -> dict[str, Any]:
        before = await self._counts()
        latencies_s = await measure()
        after = await self._counts()
        more = {key: after[key] - before[key] for key in after if key.startswith("result")}
        read_mb = round(more["result_log_bytes"] / 1e6 / max(1, len(latencies_s)), 3)
        figures = {**percentiles_ms(latencies_s, digits=1), "calls": len(latencies_s), "mb_per_call": read_mb, **more}
        say(f"{name}: {json.dumps(figures)}")
        return figures

    async def _call(self) -> float:
        """One inference; seconds until its answer."""
        customer = self._rng.randrange(len(self._customers))
        inputs = [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]
        started_s = time.perf_counter()
        headers = {"Authorization": f"Bearer {self._keys[customer]}"}
        async with self._session.post("/v2/models/digits/infer", json={"inputs": inputs}, headers=headers) as answer:
            document = await answer.json()
            if answer.status != 200 or document["id"] != answer.headers["x-request-id"]:
                self._is_wrong(answer.status, document)
        return time.perf_counter() - started_s

    def _is_wrong(self, status: int, document: Any) -> None:
        self._wrong += 1
        if self._wrong <= _SHOWN:
            say(f"answered {status}: {str(document)[:300]}")

    async def _get(self, path: str, customer: int | None = None) -> tuple[int, Any]:
        headers = {} if customer is None else {"Authorization": f"Bearer {self._keys[customer]}"}
        async with self._session.get(path, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)

    async def _counts(self) -> dict[str, int]:
        found: dict[str, int] = (await self._get("/readyz"))[1]["counts"]
        return found

    @asynccontextmanager
    async def _on_the_log_only(self) -> AsyncIterator[None]:
        """Every request gets a result 20 ms later, on the log; and results of others come as often as before."""
        settings = self._settings
        async with answering(settings.kafka, settings.redis, copies=False, after_s=0.02):
            others = asyncio.ensure_future(self._others())
            yield
            await end([others], within_s=5.0)

    async def _others(self) -> None:
        async with open_producer(self._settings.kafka) as producer:
            while True:
                others = [result(new_request_id(), customer) for customer in self._customers for _ in range(4)]
                await producer.enqueue_all(on_the_log(self._settings.kafka, others), timeout_s=10)
                await asyncio.sleep(len(others) / _OTHERS_PER_S)


def _framed(finished: InferenceFinished) -> tuple[bytes, bytes]:
    """What is before and behind the request's id in its bytes, so that a million need not be encoded one by one."""
    framed, ours = encode(finished), str(finished.request_id).encode()
    at = framed.index(ours)
    if decode(framed[:at] + ours + framed[at + len(ours) :], InferenceFinished) != finished:
        raise RuntimeError("the id is not kept as text")
    return framed[:at], framed[at + len(ours) :]


if __name__ == "__main__":
    main()
