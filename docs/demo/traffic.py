"""The demo's customers at work: digits over the Open Inference Protocol, sentences through the `openai` client.

Load is bounded and goes to the loopback address only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from openai import AsyncOpenAI

from docs.demo.checks import Answer

_AT_ONCE = 16


@dataclass(slots=True, kw_only=True)
class Sent:
    """What one customer got: answers in the order of the inputs, and how many calls were refused as over the rate."""

    answers: list[Answer] = field(default_factory=list)
    tokens: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)


async def send_digits(url: str, key: str, rows: Sequence[Sequence[float]], *, at_once: int = _AT_ONCE) -> Sent:
    """One request per digit. A 429 counts as refused and is not repeated; anything else but 200 is a failure."""
    sent = Sent()
    slots: list[Answer | None] = [None] * len(rows)
    gate = asyncio.Semaphore(at_once)

    async def one(number: int, session: aiohttp.ClientSession) -> None:
        body = {"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": list(rows[number])}]}
        async with gate, session.post(f"{url}/v2/models/digits/infer", json=body) as answer:
            request_id = answer.headers.get("x-request-id", "")
            document = await answer.json(content_type=None)
            if answer.status == 200:
                slots[number] = Answer(request_id=request_id, vectors=[document["outputs"][0]["data"]])
            elif answer.status == 429:
                sent.refused += 1
            else:
                sent.failures.append(f"{request_id}: {answer.status} {document}")

    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=60)
    ) as session:
        await asyncio.gather(*(one(n, session) for n in range(len(rows))))
    sent.answers = [slot for slot in slots if slot is not None]
    return sent


async def send_sentences(url: str, key: str, sentences: Sequence[str], *, per_call: int = 5) -> Sent:
    """Sentences in groups through the unmodified OpenAI client."""
    sent = Sent()
    groups = [list(sentences[at : at + per_call]) for at in range(0, len(sentences), per_call)]
    async with AsyncOpenAI(api_key=key, base_url=f"{url}/v1", timeout=60, max_retries=0) as client:

        async def one(group: list[str]) -> Answer:
            raw = await client.embeddings.with_raw_response.create(model="minilm", input=group)
            answer = raw.parse()
            sent.tokens += answer.usage.prompt_tokens
            return Answer(
                request_id=raw.headers.get("x-request-id", ""), vectors=[item.embedding for item in answer.data]
            )

        sent.answers = list(await asyncio.gather(*(one(group) for group in groups)))
    return sent
