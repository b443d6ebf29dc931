"""Faust as its tutorial has it: an agent that iterates over a topic and counts. The floor under our agent mode.

Started by Faust's command line; what to read and where to say how far it is comes in the environment.
"""

from __future__ import annotations

import os
from typing import Any

import faust

_place = os.open(os.environ["BENCH_COUNT_FILE"], os.O_WRONLY | os.O_CREAT)
counted = 0

app = faust.App(
    os.environ["BENCH_GROUP"],
    broker=f"kafka://{os.environ['BENCH_BOOTSTRAP']}",
    datadir=os.environ["BENCH_DATADIR"],
    web_enabled=False,
    web_port=int(os.environ["BENCH_WEB_PORT"]),
    topic_disable_leader=True,
    topic_allow_declare=False,
    autodiscover=False,
    stream_wait_empty=False,
    worker_redirect_stdouts=False,
)
topic = app.topic(
    os.environ["BENCH_TOPIC"], key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
)


@app.agent(topic)
async def count(stream: Any) -> None:
    global counted
    async for _ in stream:
        counted += 1


@app.timer(0.1)  # type: ignore[untyped-decorator]
async def tell() -> None:
    os.pwrite(_place, f"{counted:<20d}".encode(), 0)
